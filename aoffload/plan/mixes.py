"""Invented workloads for `aoffload plan --mix`: a trace without a trace.

A mix is a set of parameters. `make_mix` draws the requests of each user from a seed and returns the lines of a trace
file. The ordinary reader and the ordinary forecast do the rest, so a mix written to a file gives the same plan.

The parameters of `conversations` and `agents` are rounded from public traces: the conversation trace of Mooncake's
FAST'25 release, and recorded sessions of coding agents. Times and lengths are log-normal, because both are long-tailed
there. `documents` is the opposite case: no prompt returns.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import attrs

from ..errors import ConfigError
from ..trace.wording import counted
from .recorder import FORMAT

LOAD = 0.7
"""Without `users`, the mix has the most users whose prompts take at most this share of the time to compute, if nothing
is cached, as far as `MAX_ACCESSES` allow. So the device can serve the mix without offloading, and times to first token
stay bounded."""
MAX_ACCESSES = 4_000_000
"""Maximum blocks in all prompts of a mix. The plan of a million takes seconds."""


@attrs.frozen
class Spread:
    """A log-normal distribution above `least`, by its median and its 90th percentile."""

    median: float
    p90: float
    least: float = 0.0

    def draw(self, source: random.Random) -> float:
        median, p90 = self.median - self.least, self.p90 - self.least
        return self.least + source.lognormvariate(math.log(median), math.log(p90 / median) / 1.2816)


@attrs.frozen(kw_only=True)
class Mix:
    name: str
    about: str
    duration_s: int
    shared_tokens: int
    """System prompt and tools, the first tokens of every prompt."""
    first_tokens: Spread
    """What a session adds to the shared tokens in its first prompt."""
    turn_tokens: Spread
    """What each later prompt adds to the prompt and the answer before it."""
    answer_tokens: Spread
    max_tokens: int
    """A session ends before its prompt is longer."""
    more: float
    """Probability that a session has another request."""
    compacts: float = 0.0
    """Probability that a later prompt keeps only the shared tokens and a new summary."""
    tool: float = 0.0
    """Probability that the next request of a session follows a tool call, not a person."""
    tool_s: Spread | None = None
    """Seconds from a request to the next one of the session, after a tool call."""
    person_s: Spread
    """The same after a person has read the answer; also the time to the first request of the user's next session."""

    def assumptions(self, users: int) -> Iterator[str]:
        """What the mix assumes, one line each."""
        yield f"{counted(users, 'user')} for {counted(self.duration_s // 3600, 'hour')}: {self.about}"
        prompt = "first prompt of a session" if self.more else "each prompt"
        shared = f"{self.shared_tokens:,} tokens that all prompts share (system prompt, tools)"
        yield f"{prompt}: {shared}, and {_tokens(self.first_tokens)} more"
        if self.more:
            yield f"each later prompt: {_tokens(self.turn_tokens)} after the prompt and the answer before it"
            mean = 1 / (1 - self.more)
            yield f"requests of a session: {mean:.2g} on average; it ends before a prompt of {self.max_tokens:,} tokens"
        yield f"answers: {_tokens(self.answer_tokens)}"
        if self.compacts:
            yield f"{100 * self.compacts:.0f} % of the later prompts replace the history by a new summary"
        if self.tool_s is not None:
            yield f"a tool call follows {100 * self.tool:.0f} % of the answers; {_seconds(self.tool_s)}"
        yield f"a person reads {'the other answers' if self.tool else 'each answer'}; {_seconds(self.person_s)}"


def _tokens(spread: Spread) -> str:
    return f"{spread.median:,.0f} tokens (median; p90 {spread.p90:,.0f})"


def _seconds(spread: Spread) -> str:
    return f"the next request comes after {spread.median:,.0f} s (median; p90 {spread.p90:,.0f} s)"


MIXES = {
    mix.name: mix
    for mix in (
        Mix(
            name="conversations",
            about="people chat, and some of them paste long documents",
            duration_s=3600,
            shared_tokens=512,
            first_tokens=Spread(6_400, 28_000),
            turn_tokens=Spread(300, 5_000),
            answer_tokens=Spread(300, 700),
            max_tokens=128_000,
            more=0.38,
            person_s=Spread(100, 450),
        ),
        Mix(
            name="agents",
            about="coding agents call tools, and developers read their answers",
            duration_s=4 * 3600,
            shared_tokens=5_120,
            first_tokens=Spread(55_000, 150_000),
            turn_tokens=Spread(600, 3_600),
            answer_tokens=Spread(216, 866),
            max_tokens=200_000,
            more=0.985,
            compacts=0.02,
            tool=0.94,
            tool_s=Spread(16, 83, least=6),
            person_s=Spread(200, 2_700),
        ),
        Mix(
            name="documents",
            about="each request has a document of its own, and no prompt returns",
            duration_s=3600,
            shared_tokens=512,
            first_tokens=Spread(4_000, 16_000),
            turn_tokens=Spread(1, 1),
            answer_tokens=Spread(200, 600),
            max_tokens=128_000,
            more=0.0,
            person_s=Spread(60, 120),
        ),
    )
}


@attrs.frozen
class Made:
    mix: Mix
    users: int
    lines: tuple[str, ...]
    """The lines of a trace file."""
    has_own_users: bool
    """Whether the number of users was not given, and so depends on the speed of prefill."""

    @property
    def named_users(self) -> str:
        return counted(self.users, "user") + (" (choose with --users)" if self.has_own_users else "")


def make_mix(name: str, block_tokens: int, prefill_tokens_per_s: float, users: int | None = None) -> Made:
    """The same arguments give the same lines. Each user is drawn from a seed of its own, so more users do not change
    those before. Raises `ConfigError` for more users than `MAX_ACCESSES` allow."""
    mix = MIXES[name]
    limit, requests = LOAD * prefill_tokens_per_s * mix.duration_s, list[dict[str, Any]]()
    num_users = num_tokens = num_accesses = 0
    while users is None or num_users < users:
        added = list(_user(mix, num_users, block_tokens))
        num_tokens += sum(each["input_length"] for each in added)
        num_accesses += sum(len(each["hash_ids"]) for each in added)
        is_too_much = num_accesses > MAX_ACCESSES
        if users is None and num_users and (num_tokens > limit or is_too_much):
            break
        if is_too_much and num_users:
            raise ConfigError("users", f"must be at most {num_users:,} with --mix {name}, got {users:,}")
        requests += added
        num_users += 1
    requests.sort(key=lambda each: each["timestamp"])
    heading = {"aoffload_plan": FORMAT, "block_tokens": block_tokens}
    return Made(mix, num_users, tuple(map(json.dumps, [heading, *requests])), users is None)


def _user(mix: Mix, number: int, block_tokens: int) -> Iterator[dict[str, Any]]:
    """The requests of one user, session after session, from a random time within the first pause on."""
    source = random.Random(f"aoffload {mix.name} {number}")
    at_s, session, until_s = source.random() * mix.person_s.median, number << 16, float(mix.duration_s)
    while at_s < until_s:
        for request in _session(mix, source, session, block_tokens):
            yield request | {"timestamp": round(at_s * 1000)}
            at_s += request["returns_s"] or 0.0
            if at_s >= until_s:
                break
        at_s += mix.person_s.draw(source)
        session += 1


def _session(mix: Mix, source: random.Random, session: int, block_tokens: int) -> Iterator[dict[str, Any]]:
    ids = _Ids(mix.shared_tokens // block_tokens, session)
    num_tokens = mix.shared_tokens + _whole(mix.first_tokens.draw(source))
    while True:
        num_tokens = min(num_tokens, mix.max_tokens)
        num_answered = min(_whole(mix.answer_tokens.draw(source)), mix.max_tokens)
        num_prompt, num_all = num_tokens // block_tokens, (num_tokens + num_answered - 1) // block_tokens
        blocks = ids.up_to(num_all)
        num_next = num_tokens + num_answered + _whole(mix.turn_tokens.draw(source))
        goes_on = source.random() < mix.more and num_next <= mix.max_tokens
        calls_tool = goes_on and source.random() < mix.tool
        pause = mix.tool_s if calls_tool and mix.tool_s is not None else mix.person_s
        yield {
            "timestamp": 0,
            "input_length": num_tokens,
            "output_length": num_answered,
            "hash_ids": blocks[:num_prompt],
            "output_hash_ids": blocks[num_prompt:],
            "stop": "tool_use" if calls_tool else "end_turn",
            "returns_s": round(pause.draw(source), 3) if goes_on else None,
        }
        if not goes_on:
            return
        num_tokens = num_next
        if source.random() < mix.compacts:
            ids.forget()
            num_tokens = mix.shared_tokens + _whole(mix.first_tokens.draw(source))


def _whole(drawn: float) -> int:
    return max(1, round(drawn))


@attrs.define
class _Ids:
    """Names of the blocks of a session: the shared ones, then its own. Unique in the trace."""

    num_shared: int
    session: int
    version: int = 0

    def up_to(self, count: int) -> list[int]:
        shared = list(range(min(count, self.num_shared)))
        first = ((self.session << 12) + self.version << 20) + 1
        return shared + [first + at for at in range(self.num_shared, count)]

    def forget(self) -> None:
        self.version += 1
