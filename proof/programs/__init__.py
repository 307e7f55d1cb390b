"""Random programs of public calls, checked by oracles: explored, shortened, and replayed from one line.

A program is a world (layout, pools, policy) and calls, as plain data. `explore_programs` draws programs from seeds and
checks every law; a program that breaks one can be shortened (`Broken.shortest`) and printed as a test (`as_test`).

The faces: `ledger`; `kernel`, a ledger without any feature; `engine`, a `HostCache`; `meddled` and `meddled-engine`,
these with an extension that leases, takes and cuts at every `on_` hook; `asyncio` and `trio`, an `OffloadRuntime` whose
clients are tasks; `engine-asyncio` and `engine-trio`, a `HostCacheRuntime`. The model of `states`, `engine-states`,
`asyncio-states`, `trio-states`, `engine-asyncio-states` and `engine-trio-states` has a recurrent state.
`replay_program("ledger seed=17 calls=60")` draws a program again from its line.

`calls_of` lists the calls with their arguments. On a ledger and an engine, `who`, `name`, `step` and `job` are names of
requests, pins or transfers, forwards, and jobs such as `r1:load:0`. `serve` is a whole request, `land` lands all that
was planned, `settle` says how one copy ends. On an engine, `ask` matches again, `fewer` leaves units of its hit aside,
`sparse` names null blocks, `tick` lets its clock go on.

On a runtime, `who` is a client, `of` another one whose request it calls for. `hurry=True` does not wait for the call,
`give_up_s` puts a scope around it. `num` is a number of tokens, `by` is counted from the end of the known tokens, and
`back` backwards from the end of the computed ones. `style` of a step: "inline", "thread", "held". `most`: so many of
the planned checkpoints are written, `also`: one more, after that unit.
`call("cancel", who="a", how="native", after=2)` cancels when the client was suspended twice more; `fault` injects,
`configure` sets options, `close` leaves the runtime.
"""

from __future__ import annotations

from .explore import (
    Broken,
    ProgramTally,
    call,
    check_program,
    explore_programs,
    program_of,
    replay_program,
    run_program,
)
from .program import Call, Face, GroupShape, Outcome, Program, QuotaShape, World, draw_world
from .shrinking import as_test
from .vocabulary import calls_of

__all__ = [
    "Broken",
    "Call",
    "Face",
    "GroupShape",
    "Outcome",
    "Program",
    "QuotaShape",
    "ProgramTally",
    "World",
    "as_test",
    "call",
    "calls_of",
    "check_program",
    "draw_world",
    "explore_programs",
    "program_of",
    "replay_program",
    "run_program",
]
