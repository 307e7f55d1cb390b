"""The modules that `aoffload`'s own names are imported from, each name from one of them."""

import aoffload
import aoffload.cuda
import aoffload.host_cache
import aoffload.ledger
import aoffload.ranks
import aoffload.stores
import aoffload.transport

MODULES = [
    aoffload,
    aoffload.ledger,
    aoffload.host_cache,
    aoffload.transport,
    aoffload.ranks,
    aoffload.stores,
    aoffload.cuda,
]
