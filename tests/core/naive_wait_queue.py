"""The wait queue of the naive model: which requests wait, which keep pins, which are served, and which fail."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from naive import DEVICE, HOST, Naive, Request


@attrs.define(eq=False)
class Waiting:
    ticket: int
    request: Request
    units: int
    units_before: int
    state: str = "waiting"


@attrs.define(eq=False)
class NaiveWaitQueue:
    naive: Naive
    someone_else_holds_room: Callable[[], bool]
    allocating: list[Waiting] = attrs.field(factory=list)
    extending: list[Waiting] = attrs.field(factory=list)

    def join(self, ticket: int, request: Request, units: int) -> Waiting:
        waiting = Waiting(ticket, request, units, request.units)
        if request.units:
            self.extending.append(waiting)
        else:
            self.allocating = sorted([*self.allocating, waiting], key=lambda other: other.ticket)
            for other in self.allocating[1:]:
                self.unpin(other.request)
        self.pump()
        return waiting

    def leave(self, waiting: Waiting) -> None:
        request = waiting.request
        if waiting.state == "granted":
            num_units = request.units - (waiting.units_before or request.published)
            num_blocks = num_units * self.naive.tiers[DEVICE].width
            request.units, request.private = waiting.units_before, request.private - num_blocks
            self.naive.tiers[DEVICE].free += num_blocks
        self.allocating = [other for other in self.allocating if other is not waiting]
        self.extending = [other for other in self.extending if other is not waiting]

    def unpin(self, request: Request) -> None:
        request.published = 0
        for tier in (DEVICE, HOST):
            self.naive.hold(request, tier, 0)

    def pump(self) -> None:
        while self.extending and self._serve_extension(self.extending[0]):
            pass
        while self.allocating and not self.extending:
            first = self.allocating[0]
            self.unpin(first.request)
            self.naive.pin(first.request)
            if not self.naive.take(first.request, first.units):
                return
            self.allocating.pop(0).state = "granted"

    def _serve_extension(self, first: Waiting) -> bool:
        fits = self.naive.take(first.request, first.units)
        if not fits and self.allocating:
            self.unpin(self.allocating[0].request)  # who has nothing yet must not block who has
            fits = self.naive.take(first.request, first.units)
        if fits:
            self.extending.pop(0).state = "granted"
        elif not self.someone_else_holds_room():
            self.extending.pop().state = "failed"
        return first.state != "waiting"
