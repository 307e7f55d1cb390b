"""Scenarios on one rank, with a model of full attention."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from typing import Any

from aoffload import Tier
from benchmarks.redis_servers import NoServerError, RedisServer
from proof.attacks.payloads import hostile

from .bench import OUT, Bench, Scenario, run_part
from .engines import Engine
from .models import DENSE
from .outputs import compare
from .prompts import burst, words
from .rows import Row
from .transfers import OURS, PEER, faulty
from .transfers import ours as ours_with

__all__ = ["SCENARIOS", "SMALL_POOL", "ours", "without"]

SMALL_POOL = 70
STEP_BYTES = 512 * 2 * 2 * 32 * 4 * 2
"""KV of the 512 tokens that a step computes at most: 2 layers, 2 heads of 32 numbers for each of K and V."""
NUM_ABORTS = 120
NUM_SHARED, MOST_COPIED = 640, 25
MOST_COMPUTED = 0.8
"""Share of all prompt tokens that are computed when half of every load comes."""

DISK, REDIS = OUT / "disk", OUT / "redis"
CELL_BYTES = 1 << 17
NUM_HOST_BLOCKS = 100
FETCHES_ALL = {"prefill_tokens_per_s": 1, "fetch_timeout_s": 20}
"""Whatever it takes on this machine: how the choice goes by speeds is another matter."""
LAST_TURN = 3
FETCHED, WARM, SHARED = 0.7, 0.8, 0.6
"""Of what a pool where all fits finds (some is evicted before the disk has taken it, which its speed decides); of the
prompts of a second engine, behind a disk and behind a store: this one has whole cells of what was asked for twice."""


def without(bench: Bench, num_blocks: int = SMALL_POOL, model: str = "") -> Row:
    """`model` stands before the name of the row, where it is another."""
    with bench.engine(num_blocks) as engine:
        return bench.judge(f"{model}a small pool, without offload", bench.talk(engine))


def peer(bench: Bench) -> Row:
    with bench.engine(SMALL_POOL, PEER) as engine:
        return bench.judge("a small pool, vLLM's SimpleCPUOffloadConnector", bench.talk(engine))


def ours(bench: Bench, num_blocks: int = SMALL_POOL, model: str = "") -> Row:
    """It has to find all that a large pool finds."""
    with bench.engine(num_blocks, OURS) as engine:
        served = bench.talk(engine)
    row = bench.judge(f"{model}a small pool, aoffload", served)
    found, wanted = served.num_cached_tokens, bench.reference.num_cached_tokens
    return row.missed(f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "")


def narrow(bench: Bench) -> Row:
    """With `max_bytes_in_flight` at an eighth of a step's bytes, the hits are those of vLLM's own connector. Both rest
    between turns, because else the hits depend on how fast the machine copies."""
    with bench.engine(SMALL_POOL, PEER) as engine:
        theirs = bench.talk(engine, rests=True).num_cached_tokens
    with bench.engine(SMALL_POOL, ours_with(max_bytes_in_flight=STEP_BYTES // 8)) as engine:
        served = bench.talk(engine, rests=True)
    found = served.num_cached_tokens
    row = bench.judge("a small pool, an eighth of a step in flight", served, f"the peer finds {theirs:,} tokens")
    return row.missed(f"{found:,} tokens cached, and {theirs:,} with the peer" if found < theirs else "")


def aborts(bench: Bench) -> Row:
    """Requests are aborted after some steps, wherever they are then, among others that go on."""
    drawn, met = random.Random("aborts"), Counter[str]()
    with bench.engine(SMALL_POOL, OURS) as engine:
        names = sorted(bench.prompts, key=lambda name: name.partition(".")[2])
        for number in range(NUM_ABORTS):
            if number % 3 == 0:
                name = names[number // 3]
                engine.submit({name: bench.prompts[name]})
            said = bench.prompts[drawn.choice(names)]
            doomed = f"x{number}"
            engine.submit({doomed: said[: drawn.randrange(64, len(said))] + words(doomed, drawn.randrange(1, 80))})
            for _ in range(drawn.randrange(8)):
                engine.step()
            met[_where(engine, doomed)] += 1
            engine.abort([doomed])
        engine.finish()
        served = engine.rest()
    for doomed in [name for name in served.answers if name.startswith("x")]:
        del served.answers[doomed]
    row = bench.judge(f"{NUM_ABORTS} aborts", served, ", ".join(f"{number} {where}" for where, number in met.items()))
    return row.missed("" if met["waiting_for_remote_kvs"] else "none was aborted while it was loading")


def _where(engine: Engine, name: str) -> str:
    request = engine.request(name)
    return "over" if request is None else request.status.name.lower()


def preemption(bench: Bench) -> Row:
    """A pool so small that running requests take blocks from each other."""
    prompts = {name: prompt for name, prompt in bench.prompts.items() if name.endswith(".0")}
    with bench.engine(200) as engine:
        engine.serve(prompts, 96)
        reference = engine.rest()
    with bench.engine(34, OURS) as engine:
        engine.serve(prompts, 96)
        served = engine.rest()
    row = Bench(bench.model, reference=reference).judge(
        "preemption", served, f"{served.num_preemptions} preemptions in a pool of 33 blocks"
    )
    return row.missed("" if served.num_preemptions else "nothing was preempted")


def all_fail(bench: Bench) -> Row:
    with bench.engine(SMALL_POOL, faulty("AllFail")) as engine:
        served, transport = bench.talk(engine), engine.worker_connector.transport
    row = bench.judge("every load fails", served, f"{transport.num_failed_loads} loads failed")
    return row.missed("" if transport.num_failed_loads else "nothing was loaded")


def half_fail(bench: Bench) -> Row:
    """vLLM counts what was promised as cached; what it had to compute says what of that has come."""
    with bench.engine(SMALL_POOL, faulty("HalfFail")) as engine:
        served, transport = bench.talk(engine), engine.worker_connector.transport
    found = f"{transport.num_failed_loads} loads failed, {served.num_scheduled_tokens:,} tokens computed"
    row = bench.judge("every load fails half-way", served, found)
    all_tokens = sum(len(prompt) for prompt in bench.prompts.values())
    return row.missed(
        "" if transport.num_failed_loads else "nothing was loaded",
        "" if served.num_scheduled_tokens < all_tokens * MOST_COMPUTED else "what had landed was computed again",
    )


def tampered_and_verified(bench: Bench) -> Row:
    with bench.engine(SMALL_POOL, faulty("Counted", verify=True)) as engine:
        served = _tampered(bench, engine)
        corrupt = engine.worker_connector.transport.statistics().blocks_corrupt
    row = bench.judge("bytes in the host are changed, verify", served, f"{corrupt} blocks were found corrupt")
    return row.missed("" if corrupt else "nothing was found corrupt")


def tampered(bench: Bench) -> Row:
    """The same without the check: it has to be what saves the outputs above."""
    with bench.engine(SMALL_POOL, faulty("Counted")) as engine:
        served = _tampered(bench, engine)
    row = bench.judge("the same, without verify: outputs have to differ", served, may_differ=True)
    return row.missed("" if "differ" in row.outputs else "the outputs do not hang on these bytes")


def _tampered(bench: Bench, engine: Engine) -> object:
    for turn in range(4):
        engine.serve(bench.turn(turn))
        engine.rest()
        if turn == 1:
            engine.worker_connector.transport.tamper()
    return engine.rest()


def unproven(bench: Bench) -> Row:
    return _late(bench, "SomeUnproven", "loads are unproven and write late")


def hung(bench: Bench) -> Row:
    return _late(bench, "SomeHang", "loads hang and write late", transfer_timeout_s=0.5)


def _late(bench: Bench, name: str, about: str, **extra: object) -> Row:
    """Loads of the second turn end late: they write and are proven before the last turn. Until then their blocks have
    to be held, and nobody may compute into them."""
    with bench.engine(SMALL_POOL, faulty(name, **extra)) as engine:
        transport = engine.worker_connector.transport
        for turn in range(3):
            engine.serve(bench.turn(turn))
        num_held = engine.num_held
        num_late = transport.release()
        engine.serve(bench.turn(3))
        served = engine.rest()
    row = bench.judge(about, served, f"{num_late} loads, {num_held} blocks held until the proof")
    return row.missed("" if num_late else "no load was late", "" if num_held else "nothing was held meanwhile")


def bursts(bench: Bench) -> Row:
    """Prompts that share a prefix come at once, when only the host has it: it is to be loaded once."""
    prompts = burst(8, NUM_SHARED, 60)
    with bench.engine(200) as engine:
        engine.serve(prompts)
        reference = engine.rest()
    with bench.engine(200, faulty("Counted")) as engine:
        engine.serve({"first": prompts["b0"][: NUM_SHARED + 1]}, 1)
        engine.rest()
        engine.forget()
        engine.serve(prompts)
        served, transport = engine.rest(), engine.worker_connector.transport
    del served.answers["first"]
    row = Bench(bench.model, reference=reference).judge(
        f"a burst of 8 prompts that share {NUM_SHARED} tokens", served,
        f"{transport.blocks_loaded} blocks loaded, wanted at most {MOST_COPIED}",
    )  # fmt: skip
    return row.missed(
        "" if transport.blocks_loaded <= MOST_COPIED else "too many blocks were loaded",
        "" if transport.blocks_loaded else "nothing was loaded",
    )


def disk(bench: Bench) -> Row:
    """Host memory holds half of the conversations, a disk all of them; then a second engine takes their last turn up
    from the disk that the first one has left."""
    path, extra = DISK.resolve(), {"host_bytes": None, "num_host_blocks": NUM_HOST_BLOCKS, "max_fetch_share": 0.5}
    shutil.rmtree(path, ignore_errors=True)
    transfer = ours_with(**extra, **FETCHES_ALL, disk={"path": str(path), "size": "64MiB"})
    with bench.engine(SMALL_POOL, transfer) as engine:
        served = bench.talk(engine)
        fetched = engine.connector.ledger.statistics().disk.num_cached
    with bench.engine(SMALL_POOL, transfer) as engine:
        engine.rest()
        engine.serve(bench.turn(LAST_TURN))
        again = engine.rest()
    is_equal = compare(again.answers, {name: bench.reference.answers[name] for name in again.answers}).is_equal
    warm = again.num_cached_tokens / again.num_prompt_tokens
    row = bench.judge(
        "a small pool, half the host memory, a disk",
        served,
        f"{fetched} blocks there; {warm:.0%} of the second engine's prompt tokens cached",
    )
    wanted = bench.reference.num_cached_tokens
    return row.missed(
        "" if served.num_cached_tokens >= FETCHED * wanted else f"of {wanted:,} tokens cached",
        "" if is_equal else "the second engine has other outputs",
        "" if warm >= WARM else "the second engine did not start warm", *again.problems,
    )  # fmt: skip


def remote(bench: Bench) -> Row:
    """One engine serves the conversations, whose turns ask for the ones before them; a second one of the same model has
    nothing but the store, and takes the last turn up from there."""
    name = "a second engine, and a store between both"
    shutil.rmtree(REDIS, ignore_errors=True)
    try:
        server = RedisServer(REDIS)
    except NoServerError as error:
        return Row(name, found=str(error), was_run=False)
    with server:
        extra = {"namespace": "seeded", "max_fetch_share": 1.0, **FETCHES_ALL}
        store = {"url": f"redis://127.0.0.1:{server.port}", "cell_bytes": CELL_BYTES, "ask_timeout_s": 1}
        transfer = ours_with(**extra, remote=store)
        with bench.engine(SMALL_POOL, transfer) as engine:
            served = bench.talk(engine)
        with bench.engine(SMALL_POOL, transfer) as engine:
            engine.serve(bench.turn(LAST_TURN))
            again = engine.rest()
            counted = engine.connector.ledger.cache.tiers[Tier.HOST].num_cached
    is_equal = compare(again.answers, {name: bench.reference.answers[name] for name in again.answers}).is_equal
    warm = again.num_cached_tokens / again.num_prompt_tokens
    row = bench.judge(
        name, served, f"{warm:.0%} of the second engine's prompt tokens cached, {counted} blocks in its host memory"
    )
    return row.missed(
        "" if is_equal else "the second engine has other outputs",
        "" if warm >= SHARED else "the second engine has not found what the first one computed", *again.problems,
    )  # fmt: skip


def chosen(bench: Bench) -> Row:
    """By a speed of computing that makes every load too dear once one was measured: vLLM is told of no more hits than
    are loaded."""
    with bench.engine(SMALL_POOL, ours_with(load_choice="cost", prefill_tokens_per_s=1e9)) as engine:
        served = bench.talk(engine)
        costs = engine.connector._deciding.half.steps.costs
    row = bench.judge("a small pool, loads by cost", served, f"{costs.num_declined} hits were computed")
    return row.missed("" if costs.num_declined else "everything was loaded")


def weights(bench: Bench) -> Row:
    """All turns but the last with one version of the weights, the last one with another version, and then with the
    first one again. The calls are those of an administrator."""
    with bench.engine(SMALL_POOL, OURS) as engine:
        worker = engine.engine.engine_core.engine_core.model_executor.driver_worker.worker
        named = [each for _, each in worker.get_model().named_parameters() if each.dim() > 1]
        for turn in range(LAST_TURN):
            engine.serve(bench.turn(turn), bench.talks.num_new_tokens)
        engine.rest()
        saved, cached = [each.detach().clone() for each in named], list[int]()
        for version, factor in (("other", 1.5), ("default", 1.0)):
            for each, before in zip(named, saved, strict=True):
                each.data.copy_(before * factor)
            engine.engine.set_weight_version(version)
            engine.engine.reset_prefix_cache(reset_running_requests=True)
            for name, prompt in bench.turn(LAST_TURN).items():  # one at a time, under the names of the reference
                engine.serve({name: prompt}, bench.talks.num_new_tokens)
            cached.append(sum(engine.served.answers[name].num_cached_tokens for name in bench.turn(LAST_TURN)))
            engine.rest()
        epoch, served = engine.connector.ledger.statistics().weights_epoch, engine.rest()
    about = "vLLM's weight version changes, and changes back"
    row = bench.judge(about, served, f"{cached[0]:,} tokens cached with other weights, {cached[1]:,} once back")
    return row.missed(
        "" if cached[1] > 2 * cached[0] else "the KV has not come back",
        "" if epoch == "" else f"the epoch is {epoch}",
    )


def hints(bench: Bench) -> Row:
    """Each request carries hints, good ones or what JSON can say of bad ones, as clients send them over HTTP. Each is
    answered in the response, and no request fails."""
    rng, num_good, unanswered, most = random.Random(35), 0, list[str](), 0
    with bench.engine(SMALL_POOL, ours_with(eviction="learned", max_hint_pinned_share=0.2)) as engine:
        ledger = engine.connector.ledger
        for turn in range(LAST_TURN + 1):
            prompts, params = bench.turn(turn), dict[str, Any]()
            for name in prompts:
                verb, values = rng.choice((
                    ("pin", {"ttl_s": 60}), ("returns", {"in_s": 5, "category": "shell"}), ("prefetch", {}),
                    ("demote", {}), ("done", {}),
                ))  # fmt: skip
                good = [{"action_id": name, "action_type": verb, "action_version": "1", "payload": values}]
                params[name] = {"kv_hints": good if rng.random() < 0.5 else _of_json(rng)}
            engine.submit(prompts, bench.talks.num_new_tokens, params=params)
            engine.finish()
            for name in prompts:
                answers = (engine.params[name] or {}).get("kv_hints", [])
                given = params[name]["kv_hints"]
                is_good = isinstance(given, list) and bool(given)
                num_good += len(answers)
                if is_good and not answers:
                    unanswered.append(name)
            most = max(most, sum(pin.match.num_tokens for pin in ledger.hints.pins))
        found = ledger.statistics()
        ledger.pins.drop()
        served = engine.rest()
    about = "every request carries hints, half of them bad"
    row = bench.judge(about, served, f"{num_good} answers, {most:,} tokens pinned at most")
    total = 0 if found.hints is None else sum(found.hints.answers.values())
    return row.missed(
        f"{unanswered} were not answered" if unanswered else "",
        "" if total >= num_good > 0 else f"{total} answers counted, {num_good} given",
    )


def _of_json(rng: random.Random) -> Any:
    """What a hostile client can send as JSON. vLLM refuses larger integers itself."""
    while True:
        try:
            return json.loads(json.dumps(hostile(rng), allow_nan=False), parse_int=lambda text: int(text) % 2**63)
        except Exception:  # noqa: BLE001 - objects that raise at every use, which no client can send
            continue


SCENARIOS = (
    Scenario("without offload", without),
    Scenario("peer", peer),
    Scenario("ours", ours, is_short=True),
    Scenario("narrow", narrow, is_short=True),
    Scenario("aborts", aborts, is_short=True),
    Scenario("preemption", preemption, is_short=True),
    Scenario("every load fails", all_fail, is_short=True),
    Scenario("half", half_fail),
    Scenario("verify", tampered_and_verified, is_short=True),
    Scenario("without verify", tampered, is_short=True),
    Scenario("unproven", unproven, is_short=True),
    Scenario("hung", hung),
    Scenario("burst", bursts, is_short=True),
    Scenario("disk", disk, is_short=True),
    Scenario("remote", remote, is_short=True),
    Scenario("chosen", chosen, is_short=True),
    Scenario("weights", weights, is_short=True),
    Scenario("hints", hints, is_short=True),
)

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS)
