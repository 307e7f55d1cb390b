"""The recorder: its records of a runtime's requests, which reveal nothing about the tokens."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from aoffload import InvalidArgument, KeySpan, KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload.ledger import Prefix, Root
from aoffload.plan import Recorder, recorder
from aoffload.plan.recorder import BlockDigests
from aoffload.plan.trace import read_trace

BACKENDS = [pytest.param(("asyncio", {}), id="asyncio"), pytest.param(("trio", {}), id="trio")]
BLOCK = 4
SECRET = bytes(range(32))
ROOT = Root("model")


def config(**options: Any) -> OffloadConfig:
    return OffloadConfig(groups=[KVCacheGroup("all", block_size=BLOCK)], num_host_blocks=64, **options)


def requests_of(path: Path) -> list[dict[str, Any]]:
    """The lines about requests."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0] == {"aoffload_plan": 1, "block_tokens": BLOCK}
    return [each for each in found[1:] if "hash_ids" in each]


def serve(ledger: Ledger, prompt: Any, answer: tuple[int, ...] = (), **identity: Any) -> None:
    """One request, whose answer is computed but for its last token."""
    tokens = np.array(prompt, np.int32)
    root = Root("model", identity.pop("salt", None))
    record = ledger.admit(Prefix.of(root, tokens, identity.pop("spans", ())), **identity)
    num_tokens = len(tokens) + max(0, len(answer) - 1)
    ledger.allocate_nowait(record, num_tokens)
    ledger.abandon_load(record) if record.load is not None else ledger.plan_load(record)
    ledger.commit(record, num_tokens, answer)
    ledger.release(record)


def recorded(path: Path, *prompts: Any, secret: bytes | None = None, **options: Any) -> list[dict[str, Any]]:
    """What is written of these prompts, one after the other, without offload."""
    with Recorder(path, block_tokens=BLOCK, secret=secret) as one:
        ledger = Ledger(config(store_policy="off"), 200, observer=one)
        for prompt in prompts:
            serve(ledger, prompt, **options)
    return requests_of(path)


# -- what it writes ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_requests_of_a_runtime_are_recorded(tmp_path: Path) -> None:
    """Lengths, times and a name for each block of what was asked and answered, and a planner reads them. A request that
    computed nothing is none."""
    path = tmp_path / "asked.jsonl"
    with Recorder(path, block_tokens=BLOCK) as one:
        async with OffloadRuntime(config(), torch.zeros(65, 8), observers=[one]) as runtime:
            for prompt, answer in ((range(10), (5, 6, 7)), ([*range(10), 5, 6, 7, 9, 9], (1,))):
                async with runtime.request(list(prompt)) as request:
                    await request.allocate(num_tokens=len(prompt) + len(answer))
                    await request.load()
                    request.commit(len(prompt), answer[:1])
                    for count, token in enumerate(answer[1:], 1):
                        request.commit(len(prompt) + count, (token,))
            async with runtime.request([1, 2, 3]):
                pass
        assert runtime.observers.num_failures == 0
    first, second = requests_of(path)
    assert (first["input_length"], first["output_length"], len(first["hash_ids"])) == (10, 3, 2)
    assert len(first["output_hash_ids"]) == 1  # ten and two tokens are three blocks
    assert (second["input_length"], second["output_length"]) == (15, 1)
    assert second["hash_ids"] == first["hash_ids"] + first["output_hash_ids"] and second["output_hash_ids"] == []
    assert 0 <= first["timestamp"] <= second["timestamp"]
    trace = read_trace(path)
    assert [each.blocks.tolist() for each in trace.requests] == [[0, 1, 2], [0, 1, 2]]


def test_equal_prefixes_have_equal_names_and_no_others(tmp_path: Path) -> None:
    """The name of a block depends on all tokens before it, on the salt and on what tokens stand for."""
    asked = recorded(tmp_path / "a", [1] * 8, [1] * 12, [1, 1, 1, 1, 2, 2, 2, 2], [2, 1, 1, 1, 1, 1, 1, 1], [1, 1])
    names = [each["hash_ids"] for each in asked]
    assert names[1][:2] == names[0] and names[2][0] == names[0][0] and names[4] == []
    assert len(set(itertools.chain(*names))) == 3 + 1 + 2
    assert all(len(name) == 16 for name in itertools.chain(*names))
    span = KeySpan(5, 6, b"an image")
    path = tmp_path / "b"
    with Recorder(path, block_tokens=BLOCK) as one:
        ledger = Ledger(config(), 200, observer=one)
        serve(ledger, [1] * 8)
        serve(ledger, [1] * 8, salt="tenant")
        serve(ledger, [1] * 8, spans=[span])
        serve(ledger, [1] * 8, spans=[KeySpan(5, 6, b"another")])
    plain, salted, image, other = (each["hash_ids"] for each in requests_of(path))
    assert not set(plain) & set(salted)
    assert image[0] == plain[0] == other[0] and len({plain[1], image[1], other[1]}) == 3


def test_names_are_those_of_hmac(tmp_path: Path) -> None:
    """HMAC-SHA256 as the standard library computes it, over the root's digest and all tokens so far."""
    tokens = np.arange(12, dtype="<i4")
    for secret in (b"k" * 16, SECRET, b"k" * 64):
        found = BlockDigests(secret, BLOCK).of(ROOT, tokens.tobytes())
        texts = [ROOT.hasher.digest() + tokens[: 4 * count].tobytes() for count in (1, 2, 3)]
        assert found == [hmac.new(secret, text, hashlib.sha256).digest()[:8].hex() for text in texts]


def tenants_of(path: Path, **options: Any) -> list[str | None]:
    """What is written of the tenants of three requests, of which the last has no salt."""
    with Recorder(path, block_tokens=BLOCK, **options) as one:
        ledger = Ledger(config(), 200, observer=one)
        for salt in ("salt-a", b"salt-b", "salt-a", None):
            serve(ledger, [1] * 8, salt=salt)
    assert "salt-" not in path.read_text()
    return [each.get("tenant") for each in requests_of(path)]


def test_tenants_are_written_if_they_are_asked_for(tmp_path: Path) -> None:
    """By default no line says which requests are of one tenant. True writes a keyed digest of the salt, and a mapping
    the name of each salt that it has. No salt is written, and a plan reads the tenants."""
    assert tenants_of(tmp_path / "a") == [None] * 4
    first, second, again, none = tenants_of(tmp_path / "b", tenants=True, secret=SECRET)
    assert first == again != second and none is None
    key = BlockDigests(SECRET, BLOCK)
    assert (first, second) == (key.of_salt("salt-a"), key.of_salt(b"salt-b")) and key.of_salt(b"salt-a") != first
    assert first == hmac.new(SECRET, b"aoffload tenant 1ssalt-a", hashlib.sha256).digest()[:8].hex()
    assert first != tenants_of(tmp_path / "c", tenants=True)[0]
    names = {"salt-a": "team-a"}
    assert tenants_of(tmp_path / "d", tenants=names) == ["team-a", None, "team-a", None]
    assert read_trace(tmp_path / "d").tenants == ("team-a",)


def test_forks_are_not_recorded(tmp_path: Path) -> None:
    """They ask for nothing: they go on with what they share."""
    with Recorder(tmp_path / "a", block_tokens=BLOCK) as one:
        ledger = Ledger(config(), 200, observer=one)
        record = ledger.admit(Prefix.of(ROOT, range(8)))
        ledger.allocate_nowait(record)
        ledger.plan_load(record)
        ledger.commit(record, 8, (1,))
        child = ledger.forks.fork(record, num_tokens=12).request
        ledger.commit(child, 9, (2,))
        for each in (child, record):
            ledger.release(each)
    assert len(requests_of(tmp_path / "a")) == 1


# -- what cannot be learnt from it -------------------------------------------------------------------------------------


def guesses() -> Iterator[bytes]:
    """Every block of four tokens below six: whoever knows the vocabulary can try them all."""
    for tokens in itertools.product(range(6), repeat=BLOCK):
        yield np.array(tokens, "<i4").tobytes()


def test_no_token_can_be_recovered_without_the_secret(tmp_path: Path) -> None:
    """A dictionary of all prompts of a tiny vocabulary, against a file without its secret: plain hashes (those of the
    ledger's own index among them), weak and public keys, and the names of another file. With the secret, the same
    dictionary finds every token: the attack itself works."""
    prompt = [3, 1, 4, 1]
    names = {
        name for each in recorded(tmp_path / "a", prompt, prompt, [*prompt, 5, 2, 0, 5]) for name in each["hash_ids"]
    }
    others = {name for each in recorded(tmp_path / "b", prompt) for name in each["hash_ids"]}
    assert not names & others
    keys = [b"", bytes(16), bytes(32), b"aoffload", b"plan", b"model", *(bytes([byte]) * 32 for byte in range(256))]
    tried = 0
    for text in guesses():
        plain = [text, ROOT.hasher.digest() + text]
        hashes = [hashlib.new(kind, each).digest() for each in plain for kind in ("sha256", "sha1", "md5", "blake2b")]
        index = ROOT.hasher.copy()
        index.update(text)
        found = {digest[:8].hex() for digest in (*hashes, index.digest())}
        found |= {digest[-8:].hex() for digest in (*hashes, index.digest())}
        tried += len(found)
        assert not names & found
    for key in keys:
        tried += 1
        assert not names & set(BlockDigests(key, BLOCK).of(ROOT, np.array(prompt, "<i4").tobytes()))
    assert tried > 20_000
    known = recorded(tmp_path / "c", prompt, secret=SECRET)[0]["hash_ids"]
    dictionary = {BlockDigests(SECRET, BLOCK).of(ROOT, text)[0]: text for text in guesses()}
    assert np.frombuffer(dictionary[known[0]], "<i4").tolist() == prompt


def test_the_file_has_nothing_of_the_prompt(tmp_path: Path) -> None:
    """No id of a request, no token, no salt, no secret, and bits without a pattern although the prompts have one."""
    path = tmp_path / "a"
    prompts = [[number] * 32 for number in range(200)]
    with Recorder(path, block_tokens=BLOCK, secret=SECRET) as one:
        ledger = Ledger(config(store_policy="off"), 200, observer=one)
        for number, prompt in enumerate(prompts):
            serve(ledger, prompt, salt="a-tenant", request_id=f"somebody-{number}")
    text = path.read_text()
    assert "somebody" not in text and "a-tenant" not in text and SECRET.hex() not in text
    names = [name for each in requests_of(path) for name in each["hash_ids"]]
    assert len(set(names)) == len(names) == 200 * 8
    bits = np.unpackbits(np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(-1, 8), axis=1)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 5 * 0.5 / len(names) ** 0.5)
    assert max(Counter("".join(names)).values()) < len(names) * 16 / 16 * 1.15


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    """Who can send prompts and read the file can compare; so nobody else reads it."""
    recorded(tmp_path / "a", [1] * 8)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_secret_makes_files_comparable_and_none_does_not(tmp_path: Path) -> None:
    """Two processes with one secret write the same names."""
    first, second = (recorded(tmp_path / name, [1] * 8, secret=SECRET)[0]["hash_ids"] for name in "ab")
    other = recorded(tmp_path / "c", [1] * 8)[0]["hash_ids"]
    assert first == second and not set(first) & set(other)


# -- its life ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"secret": b"short"}, "secret"),
        ({"secret": b"x" * 65}, "secret"),
        ({"secret": "x" * 32}, "secret"),
        ({"path": "there"}, "path"),
        ({"path": "no/such/place"}, "path"),
        ({"path": None}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"env": 3}, "env"),
        ({"tenants": "all"}, "tenants"),
        ({"tenants": {"salt": 3}}, "tenants"),
        ({"tenants": {3: "team-a"}}, "tenants"),
        ({"tenants": {"salt": "x" * 257}}, "tenants"),
        ({"tenants": {"salt": "\ud800"}}, "tenants"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], argument: str
) -> None:
    """An existing file is never overwritten, and nothing is left behind by a recorder that was refused."""
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("somebody else's")
    with pytest.raises(InvalidArgument) as raised:
        Recorder(**{"path": "here", **options})
    assert raised.value.argument == argument
    assert Path("there").read_text() == "somebody else's" and not Path("here").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "aoffload plan recorder"]


def test_closing_writes_the_rest_once(tmp_path: Path) -> None:
    """Batches are larger than these few requests; a second close does nothing, and later requests are dropped."""
    one = Recorder(tmp_path / "a", block_tokens=BLOCK)
    ledger = Ledger(config(), 200, observer=one)
    serve(ledger, [1] * 8)
    assert repr(one) == "<Recorder 1 recorded, 0 dropped>"
    one.close()
    one.close()
    serve(ledger, [2] * 8)
    assert (one.num_recorded, one.num_dropped, len(requests_of(tmp_path / "a"))) == (1, 1, 1)
    assert not one._thread.is_alive()


def test_a_thread_too_far_behind_drops_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no more tokens than it may, and the file says how many requests are missing."""
    monkeypatch.setattr(recorder, "MAX_WAITING_TOKENS", 20 + 2 * recorder.REQUEST_TOKENS)
    monkeypatch.setattr(recorder, "REQUESTS_PER_BATCH", 1)
    goes_on = threading.Event()
    with Recorder(tmp_path / "a", block_tokens=BLOCK) as one:
        write = one._line
        monkeypatch.setattr(one, "_line", lambda asked: (goes_on.wait(60), write(asked))[1])
        ledger = Ledger(config(), 200, observer=one)
        for number in range(5):
            serve(ledger, [number] * 8)
        assert (one.num_recorded, one.num_dropped) == (2, 3)
        goes_on.set()
    assert len(requests_of(tmp_path / "a")) == 2
    assert read_trace(tmp_path / "a").num_dropped == 3


def test_a_full_disk_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is kept, requests go on and are counted as dropped, and closing ends."""
    monkeypatch.setattr(recorder, "REQUESTS_PER_BATCH", 1)
    with Recorder(tmp_path / "a", block_tokens=BLOCK) as one:

        def no_room(line: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(one, "_write", no_room)
        ledger = Ledger(config(), 200, observer=one)
        serve(ledger, [1] * 8)
        one._thread.join(60)
        serve(ledger, [2] * 8)
        assert isinstance(one.failure, OSError)
        assert (one.num_recorded, one.num_dropped) == (1, 1)


def test_a_live_request_is_forgotten_when_it_is_over(tmp_path: Path) -> None:
    """However it ends: nothing is kept of a request that is gone."""
    with Recorder(tmp_path / "a", block_tokens=BLOCK) as one:
        ledger = Ledger(config(), 200, observer=one)
        serve(ledger, [1] * 8)
        ledger.release(ledger.admit(Prefix.of(ROOT, range(8))))
        assert one._arrived == {}


def test_times_are_those_of_arrivals(tmp_path: Path) -> None:
    """By the clock of `env`, from the recorder's own beginning on, in ms; a line is written when a request is over."""
    times = iter([100.0, 101.0, 103.5])

    class Clock(recorder.Env):
        def now(self) -> float:
            return next(times)

    with Recorder(tmp_path / "a", block_tokens=BLOCK, env=Clock()) as one:
        ledger = Ledger(config(), 200, observer=one)
        first, second = (ledger.admit(Prefix.of(ROOT, [number] * 8)) for number in (1, 2))
        for record in (second, first):
            ledger.allocate_nowait(record)
            ledger.plan_load(record)
            ledger.commit(record, 8)
            ledger.release(record)
    assert [each["timestamp"] for each in requests_of(tmp_path / "a")] == [3500.0, 1000.0]
    assert [request.at_s for request in read_trace(tmp_path / "a").requests] == [1.0, 3.5]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_a_crowd_is_recorded_whole(tmp_path: Path) -> None:
    """More requests than a batch, at once: each is written once."""
    with Recorder(tmp_path / "a", block_tokens=BLOCK) as one:
        async with OffloadRuntime(config(), torch.zeros(65, 8), observers=[one]) as runtime:

            async def ask(number: int) -> None:
                async with runtime.request([number] * 9) as request:
                    await request.allocate()
                    await request.load()
                    request.commit(9)

            async with anyio.create_task_group() as clients:
                for number in range(150):
                    clients.start_soon(ask, number)
    assert len({each["hash_ids"][1] for each in requests_of(tmp_path / "a")}) == 150
    assert (one.num_recorded, one.num_dropped, one.failure) == (150, 0, None)
