"""Planted defects of jobs and loads: leases of their own, landing, sharing, stores."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["TRANSFER_MUTANTS"]

JOBS, LOADS = "aoffload._kernel.jobs", "aoffload._kernel.loads"

_OWNERSHIP = (
    Mutant(
        "landed in part taken for landed",
        "aoffload._kernel.plans",
        "    elif reported is Outcome.LANDED:\n        outcome = Outcome.FAILED\n",
        "",
        "a block counts only if its copy was proven",
        test="tests/core/test_transfers.py::test_a_transport_that_contradicts_itself_brings_what_it_names",
    ),
    Mutant(
        "corrupt block taken for landed",
        "aoffload._kernel.plans",
        "min((num_landed, *corrupt)) if num_landed <= num_blocks else 0",
        "num_landed if num_landed <= num_blocks else 0",
        "a block that is reported as corrupt is never published",
        test="tests/core/test_transfers.py::test_a_transport_that_contradicts_itself_brings_what_it_names",
    ),
    Mutant(
        "more blocks landed than were copied",
        "aoffload._kernel.plans",
        "min((num_landed, *corrupt)) if num_landed <= num_blocks else 0",
        "min((num_landed, *corrupt))",
        "a count that cannot be right proves nothing",
        test="tests/core/test_transfers.py::test_a_transport_that_contradicts_itself_brings_what_it_names",
    ),
    Mutant(
        "job borrows the request's lease",
        JOBS,
        "read = cache.lease(source, tail, starts, is_use=is_use)",
        "read = cache.lease(destination, tail, starts)",
        "a job owns its own leases: its source stays",
    ),
    Mutant(
        "destination path not pinned",
        JOBS,
        "written = cache.lease(destination, tail, starts)",
        "written = cache.lease(source, tail, starts)",
        "what a copy follows stays until it has landed",
    ),
    Mutant(
        "source released at launch",
        JOBS,
        "        self.moves.job(job, JOB_LAUNCHED)\n",
        "        self.moves.job(job, JOB_LAUNCHED)\n"
        "        self.cache.release(job.source_lease)\n"
        "        job.source_lease = self.cache.lease(job.plan.destination, job.run)\n",
        "a source is released when the fence has passed, not before",
    ),
    Mutant(
        "load source released at launch",
        JOBS,
        "        self.moves.job(job, JOB_LAUNCHED)\n",
        "        self.moves.job(job, JOB_LAUNCHED)\n"
        "        if job.plan.direction is LOAD:\n"
        "            self.cache.release(job.source_lease)\n"
        "            job.source_lease = self.cache.lease(job.plan.destination, job.run)\n",
        "host pins end when the load settles",
        programs=True,
    ),
    Mutant(
        "published at launch",
        JOBS,
        "        self.moves.job(job, JOB_LAUNCHED)\n",
        "        self.moves.job(job, JOB_LAUNCHED)\n        self._land(job, job.stop, keep_ids=True)\n",
        "findable only when the bytes are proven there",
    ),
    Mutant(
        "run looked up by its key at completion",
        JOBS,
        "            part, last = run.parts[place], min(stop, proven_stop)\n",
        "            part, last = self.cache.index.runs[run.key].parts[place], min(stop, proven_stop)\n",
        "ids of an unfinished transfer belong to the job, not to the index",
    ),
    Mutant(
        "destination read from the table at completion",
        JOBS,
        "        for run, first, stop in stretches(job.run, job.start, job.stop):\n            part",
        "        for waiting in job.claims:\n"
        "            ids = waiting.table[job.start * width : job.stop * width]\n"
        "        for run, first, stop in stretches(job.run, job.start, job.stop):\n            part",
        "never look a request up at completion",
    ),
    Mutant(
        "adopted blocks leak",
        LOADS,
        "            self.cache.give(DEVICE, request.tables[component.number].null(start, stop))\n",
        "            request.tables[component.number].null(start, stop)\n",
        "nothing leaks: blocks that others bring are given back",
    ),
)

_LANDING = (
    Mutant(
        "no epoch check at landing",
        JOBS,
        "            if job.epoch == self.cache.epoch and not is_unproven:\n",
        "            if not is_unproven:\n",
        "late landings after a reset or an invalidation only free",
        scenarios=("failed_forwards",),
    ),
    Mutant(
        "quarantine frees the destination",
        JOBS,
        "proven_stop, keep_ids=is_unproven)",
        "proven_stop, keep_ids=False)",
        "leak, don't corrupt: unproven destinations are never reused",
    ),
    Mutant(
        "late proof ignored",
        JOBS,
        "            if job is None and outcome is not UNPROVEN and",
        "            if False and",
        "late proof ends a quarantine",
    ),
    Mutant(
        "doubt repeated ends a quarantine",
        JOBS,
        "            if job is None and outcome is not UNPROVEN and",
        "            if job is None and",
        "only proof ends a quarantine",
        scenarios=("late_room",),
    ),
    Mutant(
        "quarantine ended twice",
        JOBS,
        "self.quarantined.pop(completion.job_id).plan",
        "self.quarantined[completion.job_id].plan",
        "second completions are ignored",
    ),
    Mutant(
        "second completion replaces a parked one",
        JOBS,
        "        if job is None or job.parked is not None:\n",
        "        if job is None:\n",
        "settle once: a second completion changes nothing",
        scenarios=("split_transfers",),
    ),
    Mutant(
        "failed copy counts as landed",
        JOBS,
        "if outcome is LANDED else completion.num_landed // width",
        "if outcome in (LANDED, FAILED) else completion.num_landed // width",
        "loaded means proven",
    ),
    Mutant(
        "corrupt copy counts as landed",
        JOBS,
        "if outcome is LANDED else completion.num_landed // width",
        "if outcome is not FAILED else completion.num_landed // width",
        "loaded means verified",
    ),
    Mutant(
        "part of a unit counts as all of it",
        JOBS,
        "else completion.num_landed // width\n",
        "else -(-completion.num_landed // width)\n",
        "a hit is one for every group at once",
        scenarios=("two_groups",),
    ),
    Mutant(
        "corrupt entry not forgotten",
        JOBS,
        "            self._forget_corrupt(job, completion)\n",
        "            pass\n",
        "a content failure forgets the bad entry",
    ),
    Mutant(
        "failure forgets what is right",
        JOBS,
        "            if is_bad and job.run.epoch == self.cache.epoch:\n",
        "            is_proven = job.epoch == self.cache.epoch and job.destination_lease is not None\n"
        "            if outcome in (FAILED, CORRUPT) and is_proven and plan.source is BELOW:\n"
        "                bad = completion.corrupt or (completion.num_landed,)\n"
        "                completion = attrs.evolve(completion, corrupt=bad)\n",
        "a transient error forgets nothing",
        scenarios=("shared_load",),
    ),
    Mutant(
        "published behind a gap",
        "aoffload._kernel.cache",
        " and before is not None and before.parts[part.tier].stop != before.stop:\n",
        " and before is not None and before.parts[part.tier].stop < 0:\n",
        "publish in prefix order",
        scenarios=("branches",),
    ),
    Mutant(
        "predecessors not waited for",
        JOBS,
        "            job.parked = completion\n",
        "",
        "a later completion waits for what lies before it",
        also=(
            Patch(
                JOBS,
                "invalidated(plan.destination_ids)\n            return []\n",
                "invalidated(plan.destination_ids)\n",
            ),
        ),
    ),
    Mutant(
        "parked completion forgotten",
        JOBS,
        "            if follower.is_settled:\n                continue\n",
        "            if follower.is_settled or follower.parked is not None:\n                continue\n",
        "no hang: what waited for a job is settled with it",
    ),
    Mutant(
        "chain of jobs broken by an early end",
        JOBS,
        "            elif before is not None:\n                before.followers.append(follower)\n",
        "",
        "what is on its way follows what its predecessor followed",
        scenarios=("stored_twice",),
    ),
)

_SHARING = (
    Mutant(
        "follower does not wait",
        LOADS,
        "        for job in (*shared, *new):\n",
        "        for job in new:\n",
        "two requests, one load: the second waits for it",
    ),
    Mutant(
        "what is on its way counts as ready",
        LOADS,
        "            ready = max(start, held_stop(layout, path, DEVICE, start, load.stop))",
        "            there = held_stop(layout, path, DEVICE, start, load.stop)\n"
        "            ready = max(start, jobs_bringing(stretches(run, start, load.stop), DEVICE, there)[1])",
        "loaded means landed",
    ),
    Mutant(
        "leader's cancellation discards a shared load",
        JOBS,
        "            if not job.claims and job.state is JOB_QUEUED",
        "            if job.state is JOB_QUEUED",
        "a load lives as long as one waiter does",
        scenarios=("shared_load",),
    ),
    Mutant(
        "load without a waiter not discarded",
        JOBS,
        "            if not job.claims and job.state is JOB_QUEUED",
        "            if job.claims and job.state is JOB_QUEUED",
        "a queued load is discarded at zero waiters",
    ),
    Mutant(
        "host hit counts before it is loaded",
        "aoffload._kernel.leases",
        "        request.num_computed_tokens = stop * self.cache.layout.unit_tokens\n",
        "        request.num_computed_tokens = request.hit_stop * self.cache.layout.unit_tokens\n",
        "a failed load is a miss",
    ),
    Mutant(
        "failed load keeps the path",
        LOADS,
        "            step_back(self.request_leases, request, ready)\n",
        "",
        "what is recomputed is private",
    ),
    Mutant(
        "host lease kept after the load",
        LOADS,
        "        self.request_leases.end_host_lease(request)\n"
        "        if request.checkpoints is not None:\n            request.checkpoints.resume",
        "        if request.checkpoints is not None:\n            request.checkpoints.resume",
        "host pins end when the load settles",
    ),
    Mutant(
        "room for a failed load not looked at",
        LOADS,
        "            if num_missing > self.admission.num_available:\n",
        "            if num_missing > self.admission.capacity:\n",
        "a load can always give up: it queues again without room",
    ),
    Mutant(
        "load rounds up to a block",
        LOADS,
        'limit = check_int("max_tokens", max_tokens, 0) // self.cache.layout.unit_tokens',
        'limit = self.cache.layout.num_units(check_int("max_tokens", max_tokens, 0))',
        "load(max_tokens=) rounds down to a block",
        scenarios=("mixed",),
    ),
    Mutant(
        "no pump after a load gave blocks back",
        "aoffload._kernel.ledger",
        "max_tokens, wake, units_per_job)\n        self.end_call()\n",
        "max_tokens, wake, units_per_job)\n",
        "everything that changes room serves the line",
    ),
)

_STORES = (
    Mutant(
        "store in flight offered again",
        "aoffload._kernel.cache",
        "if other.incoming is None else covered(other)\n",
        "\n",
        "a range being stored isn't stored again (I3)",
    ),
    Mutant(
        "store in flight forgotten with the one behind it",
        JOBS,
        "                part.incoming = before\n",
        "                part.incoming = None\n",
        "a range being stored isn't stored again, whichever job ends first",
        scenarios=("stored_twice",),
    ),
    Mutant(
        "failed store never offered again",
        JOBS,
        "            if part.incoming is job:\n",
        "            if part.incoming is job and part.stop >= stop:\n",
        "after a failure the offload that was wanted is offered again (I3)",
    ),
    Mutant(
        "store evicts what it hangs on",
        "aoffload._kernel.jobs",
        "pin = self.cache.lease(self.destination, end,",
        "pin = self.cache.lease(self.source, end,",
        "a store never evicts its own prefix",
        scenarios=("conversations",),
    ),
    Mutant(
        "store waits for no host room",
        "aoffload._kernel.jobs",
        "wanted, fit, allowed = stop - start, there.num_available // component.width",
        "wanted, fit, allowed = stop - start, there.capacity // component.width",
        "a store that finds no room is skipped",
    ),
)

TRANSFER_MUTANTS: tuple[Mutant, ...] = _OWNERSHIP + _LANDING + _SHARING + _STORES
