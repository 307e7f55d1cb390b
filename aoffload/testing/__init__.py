"""Schedule exploration: runs the whole runtime under a seeded scheduler, with virtual time and injected faults.

It is for this package's own proof, and for programs that embed the runtime: write a scenario, `simulate` it, replay it.
"""

from __future__ import annotations

from .._common.extras import needed

with needed("trio", "aoffload.testing"):
    from .asks import Ask
    from .choosers import Chooser, Exactly, Option, PriorityChooser, RandomChooser
    from .clients import Client
    from .engine import SPOILED, ForwardFailed
    from .env import SimulatedEnv
    from .explore import Tally, cancel_sweep, exhaust, explain, fault_sweep, replay, shrink
    from .faults import FAULTS, Fault, FaultKind
    from .faulty import FaultyTransport, JobFault
    from .injection import HOWS, Cancel
    from .memory import Memory, Tags
    from .plans import Plan, Result
    from .scheduler import Decision, Scheduler
    from .serving import SimulatedEngine
    from .simulated_store import SimulatedStore, StoreCall, StoreFault
    from .simulation import Scenario, Simulation, simulate
    from .transport import SimulatedTransport
    from .violations import Violation

__all__ = [
    "FAULTS",
    "HOWS",
    "SPOILED",
    "Ask",
    "Cancel",
    "Chooser",
    "Client",
    "Decision",
    "Exactly",
    "Fault",
    "FaultKind",
    "FaultyTransport",
    "ForwardFailed",
    "JobFault",
    "Memory",
    "Option",
    "Plan",
    "PriorityChooser",
    "RandomChooser",
    "Result",
    "Scenario",
    "Scheduler",
    "SimulatedEngine",
    "SimulatedEnv",
    "SimulatedStore",
    "SimulatedTransport",
    "Simulation",
    "StoreCall",
    "StoreFault",
    "Tags",
    "Tally",
    "Violation",
    "cancel_sweep",
    "exhaust",
    "explain",
    "fault_sweep",
    "replay",
    "shrink",
    "simulate",
]
