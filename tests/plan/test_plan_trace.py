"""Reading traces: public ones, our recorder's, and files that are neither."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import conversations, write_trace

from aoffload.plan.trace import Trace, TraceError, read_trace


def line(**fields: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2], **fields})


def read(tmp_path: Path, *lines: str, **options: Any) -> Trace:
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    return read_trace(tmp_path / "a.jsonl", **options)


def test_a_public_trace_is_read(tmp_path: Path) -> None:
    """Times in seconds, lengths, and a number for each prefix; the last block may be full or partly filled."""
    trace = read(
        tmp_path,
        line(),
        line(timestamp=1500, hash_ids=[1, 3]),
        "",
        line(timestamp=500.5, hash_ids=[7], input_length=512),
    )
    assert [request.at_s for request in trace.requests] == [0.0, 0.5005, 1.5]
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1], [3], [0, 2]]
    assert (trace.num_blocks, trace.num_asked, trace.num_prompt_tokens, trace.duration_s) == (4, 5, 1712, 1.5)
    assert (trace.block_tokens, trace.num_dropped, trace.most_blocks) == (512, 0, 2)


def test_an_id_counts_with_all_before_it(tmp_path: Path) -> None:
    """A trace whose ids name blocks and not prefixes is read as if they were chained; so is one that repeats an id."""
    ids = [[1, 2], [3, 2], [1, 2], [2, 2]]
    trace = read(tmp_path, *(line(hash_ids=each) for each in ids))
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1], [2, 3], [0, 1], [4, 5]]
    named = read(tmp_path, *(line(hash_ids=[str(one) for one in each]) for each in ids))
    assert [request.blocks.tolist() for request in named.requests] == [each.blocks.tolist() for each in trace.requests]


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "many.jsonl", conversations(1, 50))
    assert len(read_trace(path, 8, limit=7).requests) == 7


def test_blocks_of_answers_are_no_prompt(tmp_path: Path) -> None:
    """They are touched, and not asked for."""
    heading = '{"aoffload_plan":1,"block_tokens":16}'
    trace = read(tmp_path, heading, line(input_length=40, hash_ids=["a", "b"], output_hash_ids=["c"]))
    (request,) = trace.requests
    assert (request.blocks.tolist(), request.num_prompt_blocks, trace.block_tokens) == ([0, 1, 2], 2, 16)


def test_fields_about_sessions_and_tenants_are_read(tmp_path: Path) -> None:
    """Each of them may be missing. A session that never returns has null, which is not the same as no field."""
    trace = read(
        tmp_path,
        line(),
        line(timestamp=1, stop="tool_use", returns_s=2.5, tenant="team-a"),
        line(timestamp=2, stop="", returns_s=None, tenant="team-b"),
        line(timestamp=3, stop=None, returns_s=0, tenant=None),
    )
    assert [request.stop for request in trace.requests] == [None, "tool_use", "", None]
    assert [request.returns_s for request in trace.requests] == [None, 2.5, math.inf, 0.0]
    assert [request.tenant for request in trace.requests] == [None, "team-a", "team-b", None]
    assert trace.tenants == ("team-a", "team-b")


def test_tenants_share_no_block(tmp_path: Path) -> None:
    """The tenant is the salt, so equal ids of two tenants are two blocks."""
    tenants = ("team-a", "team-b", None, "team-a", None)
    trace = read(tmp_path, *(line(timestamp=at, tenant=tenant) for at, tenant in enumerate(tenants)))
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1], [2, 3], [4, 5], [0, 1], [4, 5]]


HEADING = '{"aoffload_plan":1,"block_tokens":16}'


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        ([], {}, "no request in it"),
        (["{"], {}, "line 1: is no JSON"),
        (["[" * 100_000], {}, "line 1: is no JSON"),
        ([line(), "[1]"], {}, "line 2: is no JSON object"),
        (['{"event":"request_done","timestamp":"2026-11-21T21:50:16"}'], {}, "is an event of a log"),
        ([line(timestamp=None)], {}, "has no timestamp"),
        ([line(timestamp=float("nan"))], {}, "has no timestamp"),
        ([line(timestamp="0")], {}, "has no timestamp"),
        ([line(timestamp=True)], {}, "has no timestamp"),
        ([line(timestamp=10**400)], {}, "has no timestamp"),
        ([line(timestamp=1e308)], {}, "has no timestamp"),
        ([line(input_length=0)], {}, "needs input_length"),
        ([line(input_length=True)], {}, "needs input_length"),
        ([line(input_length=2**40)], {}, "needs input_length"),
        ([line(output_length=-1)], {}, "needs output_length"),
        ([line(hash_ids=None)], {}, "has no list of ids as hash_ids"),
        ([line(hash_ids=[1, None])], {}, "has no list of ids as hash_ids"),
        ([line(hash_ids=[[1], 2])], {}, "has no list of ids as hash_ids"),
        ([line(output_hash_ids=3)], {}, "has no list of ids as output_hash_ids"),
        ([line(stop=3)], {}, "needs text of at most 256 characters as stop"),
        ([line(stop="x" * 257)], {}, "as stop"),
        ([line(tenant=["a"])], {}, "needs text of at most 256 characters as tenant"),
        ([line(tenant="\ud800")], {}, "as tenant"),
        ([line(returns_s="5")], {}, "needs returns_s, seconds from 0 on, or null"),
        ([line(returns_s=-1)], {}, "needs returns_s"),
        ([line(returns_s=True)], {}, "needs returns_s"),
        ([line(returns_s=float("nan"))], {}, "needs returns_s"),
        ([line(returns_s=float("inf"))], {}, "needs returns_s"),
        ([line(hash_ids=[1, 2, 3])], {}, "has 3 hash_ids for 600 tokens: are blocks of 512 tokens?"),
        ([line()], {"block_tokens": 16}, "are blocks of 16 tokens?"),
        ([HEADING], {}, "no request in it"),
        ([HEADING, line(input_length=40)], {"block_tokens": 512}, "says blocks of 16 tokens, not of 512"),
        ([line(), HEADING], {}, "line 2: says blocks of 16 tokens"),
        (['{"aoffload_plan":2,"block_tokens":16}'], {}, "is of another version"),
        (['{"aoffload_plan":1}'], {}, "needs block_tokens"),
        (['{"aoffload_plan":1,"block_tokens":0}'], {}, "needs block_tokens"),
        (['{"num_dropped":-1}'], {}, "needs num_dropped"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(
    tmp_path: Path, lines: list[str], options: dict[str, Any], problem: str
) -> None:
    """One typed error that names the file, the line and what is wrong, whatever the line holds."""
    with pytest.raises(TraceError) as raised:
        read(tmp_path, *lines, **options)
    assert str(raised.value).startswith("a.jsonl") and problem in str(raised.value)


def test_bytes_that_are_no_text_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00\x01\n")
    with pytest.raises(TraceError, match="line 1: is no JSON"):
        read_trace(tmp_path / "b.jsonl")


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    """A file whose name ends with `.gz` is decompressed. One that was cut off is refused, and not read in part."""
    line = b'{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}\n'
    whole = gzip.compress(line * 1000)
    (tmp_path / "trace.jsonl.gz").write_bytes(whole)
    assert len(read_trace(tmp_path / "trace.jsonl.gz").requests) == 1000
    for wrong in (whole[:-12], whole[:20] + bytes(20), line):
        (tmp_path / "wrong.gz").write_bytes(wrong)
        with pytest.raises(TraceError, match=r"wrong\.gz is no complete gzip file"):
            read_trace(tmp_path / "wrong.gz")
