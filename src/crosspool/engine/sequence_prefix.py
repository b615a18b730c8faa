"""SequencePrefix: which of one sequence's pages others can find, and under which keys."""

from dataclasses import dataclass, field

from crosspool.kv_pool.prefix_cache import CachedPage
from crosspool.kv_pool.prefix_chain import PrefixChain


@dataclass(slots=True)
class SequencePrefix:
    """filled: an entry for each page that has been wholly written; None where another page was known by its key."""

    chain: PrefixChain
    filled: list[CachedPage | None] = field(default_factory=list)
