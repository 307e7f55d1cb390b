"""The weights' epoch: which weights of the model computed the cached KV.

KV is a function of the tokens and of the weights. An engine that changes its weights while it serves (reinforcement
learning, a hot update) must not read KV of the weights before. A reset guarantees that, but forgets everything, also on
the disk. The weights' epoch is a name for the weights, such as a checkpoint or a step. It is a part of the root of all
KV, so the KV of each epoch is under roots of its own:

    root digest    SHA-256 of namespace, cache_salt and adapter_key; with an epoch, SHA-256 of that digest and the epoch
    at a change    new prefixes get the roots of the new epoch; the runs of the others stay where they are

So the change itself moves no KV and forgets none. KV of another epoch is unfindable at once, is evicted like any other
KV that no request uses, and is found again if its epoch returns: on the device, in host memory, on the disk, and in the
remote store, also after a restart.

What becomes of the requests at a change:

    has not begun       its match is dropped. It is matched again under the new root: it is a request of the new epoch
    its load is not     the load ends with no tokens, and the request computes from its first token, as after a reset.
    over                Copies under way land under their old root
    computes            it goes on with its blocks. They hold KV of old or mixed weights from now on
    preempted           it computes again from its first token when it is resumed

The last three publish and store nothing any more (`NoEpoch.ORPHANED`), even if their epoch returns, because no record
says which of their later KV is of which weights. `CacheBase.has_begun` says which requests have begun. A `HostCache`
does not see whether a PINNED request computes, so it counts as begun until its engine calls `match_again`.

Pins end, because they keep KV that no request finds. Prefetches, demotions, fetches and stores under way go on under
their old roots: all KV that they copy was published before the change. Hints stay with the prompts of their epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from .._common.prefix import Prefix, Root, check_epoch
from .._kernel.base import CacheBase
from .._kernel.events import Event
from .._kernel.extension import LedgerExtension
from .._kernel.records import LedgerRequest
from .._kernel.states import NoEpoch
from .._kernel.tokens import TokenSequence
from .pins import Pins, PinState

MAX_ROOTS = 1024
"""Maximum entries of `Weights._roots`, because callers choose the keys."""


@attrs.frozen
class WeightsChanged(Event):
    """Another weights' epoch was set."""

    previous: str
    epoch: str


class Weights(LedgerExtension):
    """Changes the weights' epoch (`Ledger.weights`)."""

    def __init__(self) -> None:
        self.epoch = ""
        """The weights' epoch; empty: none."""
        self.num_changes = 0
        """Times that `set` has changed the epoch."""
        self.when_changed: list[Callable[[], object]] = []
        """Called at each change, in the middle of a call. They must not call the ledger."""
        self._roots: dict[Root, Root] = {}
        """The roots of this epoch, by the root that callers pass."""

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger = ledger
        self._begin(check_epoch("weights_epoch", ledger.config.weights_epoch))

    def set(self, epoch: str) -> None:
        """Set the weights' epoch: the name, of at most 256 characters, of the weights that the engine computes with
        from now on. An empty name is the epoch of programs that set none. Does nothing if `epoch` is the current epoch.
        Otherwise, no request begins to compute with KV of another epoch after this call, and every pin ends (DROPPED).

        Call it between the last forward with the old weights and the first forward with the new weights, after you have
        committed the results of the last old forward. If a forward runs during the call, its requests publish nothing
        any more, so no wrong KV is cached.
        """
        ledger, new = self._ledger, check_epoch("epoch", epoch)
        ledger.hooks.refuse_verb()
        old = self.epoch
        if new == old:
            return
        if (pins := ledger.find(Pins)) is not None:
            pins.end_all(PinState.DROPPED)
        self._begin(new)
        for request in ledger.possible_publishers():
            if ledger.has_begun(request):
                request.epoch = NoEpoch.ORPHANED
            else:
                self._put_under(request)
        ledger.match_all_again()
        self.num_changes += 1
        for call in self.when_changed:
            call()
        ledger.moves.note(WeightsChanged(old, new))
        ledger.end_call(ledger.pending_wakes())  # a load of another epoch is not worth the wait

    def begin_again(self, request: LedgerRequest) -> None:
        """Make `request`, which was matched before a change and has not begun, a request of the present epoch. The
        caller matches it again."""
        self._put_under(request)
        request.epoch = self._ledger.cache.epoch

    def _put_under(self, request: LedgerRequest) -> None:
        """Put the prompt of `request` under the root of the present epoch."""
        request.sequence = request.sequence.under(self.root_of(request.sequence.root))
        for hook in self._ledger.hooks.on_sequence:
            hook(request.sequence)

    def is_findable(self, root: Root) -> bool:
        """Whether requests of the present epoch may find KV under `root`. The keys of a root that was read from a disk
        are unknown: it counts as findable until an epoch is set."""
        if root.weights_epoch is None:
            return not (self.epoch or self.num_changes)
        return root.weights_epoch == self.epoch

    def root_of(self, root: Root) -> Root:
        """The root of this epoch with the keys of `root`."""
        found = self._roots.get(root)
        if found is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            self._roots[root] = found = root.under_weights(self.epoch)
        return found

    def _begin(self, epoch: str) -> None:
        """Put the prefixes that callers pass from now on under the roots of `epoch`."""
        self.epoch, self._roots = epoch, {}
        self._ledger.new_sequence = self._new_sequence if epoch else TokenSequence

    def _new_sequence(self, prefix: Prefix, unit_tokens: int) -> TokenSequence:
        return TokenSequence(Prefix(self.root_of(prefix.root), prefix.tokens, prefix.spans), unit_tokens)
