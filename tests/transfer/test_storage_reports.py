"""Reports on disabled storage: each node is named once, and many nodes are summarised."""

from __future__ import annotations

import pytest

from aoffload._common.tiers import Tier
from aoffload._transfer.breaker import Breaker, LeftAlone, StorageMove, Use, in_lines, in_words

REFUSED = "Error 111 connecting to cache:6379. Connection refused."


def test_a_node_that_its_error_names_is_named_once() -> None:
    """Clients of stores name the server in their errors, or do not."""
    assert str(LeftAlone(Use.LOAD, "cache:6379", REFUSED)) == f"no loads for now: {REFUSED}"
    assert str(LeftAlone(Use.LOAD, "cache:6379", "full")) == "no loads at cache:6379 for now: full"
    assert str(LeftAlone(Use.STORE, "", "full")) == "no stores for now: full"


@pytest.mark.parametrize("error", ["of node-12: full", "of another-node-1x: full"])
def test_a_longer_name_is_another_node(error: str) -> None:
    """What only begins as the name of the node does not name it."""
    assert str(LeftAlone(Use.ASK, "node-1", error)) == f"no questions at node-1 for now: {error}"


def test_a_log_of_lines_names_it_once_too() -> None:
    """Also when it is back, where there is no error."""
    breaker = Breaker()
    assert breaker.failed(0.0, REFUSED) is None
    move = breaker.failed(0.0, REFUSED)
    assert move is not None
    text = in_words(StorageMove(Tier.REMOTE, Use.LOAD, "cache:6379", move))
    assert text.count("cache:6379") == 1 and text.startswith("loads of the remote tier have failed 2 times")
    back = breaker.succeeded(1.0)
    assert back is not None
    assert in_words(StorageMove(Tier.REMOTE, Use.LOAD, "cache:6379", back)) == (
        "loads of the remote tier at cache:6379 succeed again, after 1.0 s; 0 were refused"
    )


def test_many_nodes_are_one_line_for_each_use() -> None:
    """With the three that failed most often in a row; a use with few of them has a line for each, as ever."""
    loads = [LeftAlone(Use.LOAD, f"node-{number}", "full", 2 + number) for number in range(1_100)]
    stores = [LeftAlone(Use.STORE, "node-3", "full", 5)]
    assert list(in_lines("the store", loads[:7] + stores)) == [
        f"the store is suspended, {one}" for one in loads[:7] + stores
    ]
    assert list(in_lines("the store", loads + stores)) == [
        "the store is suspended, no loads at 1,100 nodes for now; most failures in a row: "
        "node-1099 (1,101: full), node-1098 (1,100), node-1097 (1,099)",
        "the store is suspended, no stores at node-3 for now: full",
    ]
