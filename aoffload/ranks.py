"""Public names of several ranks behind one transport. See docs/ranks.md."""

from .errors import WireError
from .transfer.ranks.process import ProcessRank
from .transfer.ranks.rank import LocalRank, Rank
from .transfer.ranks.tally import JobTally
from .transfer.ranks.transport import RankFence, RankTransport

__all__ = ["JobTally", "LocalRank", "ProcessRank", "Rank", "RankFence", "RankTransport", "WireError"]
