"""Public names for one transport over several ranks. See docs/ranks.md."""

from ._transfer.ranks.process import ProcessRank
from ._transfer.ranks.rank import LocalRank, Rank
from ._transfer.ranks.transport import JobTally, RankFence, RankTransport
from .errors import WireError

__all__ = ["JobTally", "LocalRank", "ProcessRank", "Rank", "RankFence", "RankTransport", "WireError"]
