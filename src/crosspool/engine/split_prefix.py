"""SplitPrefix: the prefix cache of one split model. The parts of a page are cached on the ranks where they lie.

Under `tokens` a page has one part, on any rank. Under `heads` it has one on each, and can be used while all are there:
parts of the same tokens fit together, whichever sequences wrote them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.pool import Page
from crosspool.kv_pool.prefix_cache import CachedPage

Part = tuple[int, Page]
"""A page's frames on one rank, by the rank's index."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Cached pages that hold a sequence's first tokens, in order; each as its parts, by rank."""

    pages: tuple[tuple[tuple[int, CachedPage], ...], ...] = ()

    def on(self, rank: int) -> list[CachedPage]:
        return [cached for page in self.pages for own, cached in page if own == rank]

    @property
    def tables(self) -> tuple[Page, ...]:
        """The pages as block tables have them."""
        return tuple(tuple(frame for _, cached in page for frame in cached.page) for page in self.pages)


class SplitPrefix:
    """`ranks` are the model's KV ranks in order; all of them cache prefixes."""

    def __init__(self, model: ServedModel, ranks: Items[KVRankPages]) -> None:
        self._model = model
        caches = [pages.prefix for pages in ranks]
        self._caches: list[PrefixPages] = [cache for cache in caches if cache is not None]
        assert len(self._caches) == len(ranks), "either all KV ranks cache prefixes or none"
        self._filled: dict[int, list[tuple[tuple[int, CachedPage | None], ...]]] = {}  # by sequence: its written pages

    def find(self, sequence: Sequence) -> FoundPrefix:
        """Pages for a queued sequence. Its last token is never among them: it has to run for the next to be drawn."""
        last = (sequence.num_tokens - 1) // self._model.page_tokens
        pages = []
        for key in self._caches[0].chain(sequence).reach(last, sequence.token_ids)[:last]:
            parts = [
                (rank, found)
                for rank, cache in enumerate(self._caches)
                if (found := cache.cache.get(self._model.name, key)) is not None
            ]
            if self._model.kv_split == "tokens":
                parts = parts[:1]
            if not parts or (self._model.kv_split == "heads" and len(parts) < len(self._caches)):
                break
            pages.append(tuple(parts))
        return FoundPrefix(tuple(pages))

    def in_use(self, found: FoundPrefix) -> list[int]:
        """Frames of `found` on each rank that others hold: whoever uses the pages too needs so many less of its own."""
        return [cache.frames_in_use(found.on(rank)) for rank, cache in enumerate(self._caches)]

    @contextmanager
    def lent(self, found: FoundPrefix) -> Iterator[None]:
        """Meanwhile, what a sequence would share with others counts as shared."""
        with ExitStack() as stack:
            for rank, cache in enumerate(self._caches):
                stack.enter_context(cache.lent(found.on(rank)))
            yield

    def use(self, sequence: Sequence, found: FoundPrefix) -> None:
        """The sequence uses `found`, whose tokens it need not run."""
        for rank, cache in enumerate(self._caches):
            cache.add_user(found.on(rank), sequence.sequence_id)
        self._filled[sequence.sequence_id] = list(found.pages)
        sequence.num_cached_tokens = len(found.pages) * self._model.page_tokens

    def started(self, sequence: Sequence) -> None:
        """Its first step has been handed out; the counts are kept on the home's rank."""
        self._caches[0].started(sequence)

    def note_filled(self, sequence: Sequence, parts_of: Items[Items[Part]]) -> None:
        """A step has ended well: the pages that it filled can be found. parts_of: of the sequence's pages, in order."""
        filled, chain = self._filled[sequence.sequence_id], self._caches[0].chain(sequence)
        for page in range(len(filled), sequence.num_cached_tokens // self._model.page_tokens):
            key = chain.reach(page + 1, sequence.token_ids)[page]
            name, user = self._model.name, sequence.sequence_id
            filled.append(
                tuple((rank, self._caches[rank].cache.insert(name, key, own, user)) for rank, own in parts_of[page])
            )

    def leave(self, sequence: Sequence, parts_of: Items[Items[Part]]) -> list[Part]:
        """An ended sequence leaves its block table; gives the parts that are of no use to others.

        Its budgets' claims are closed already.
        """
        filled, keys = self._filled.pop(sequence.sequence_id), self._caches[0].chain(sequence).keys
        free = [part for parts in parts_of[len(filled) :] for part in parts]
        for page in reversed(range(len(filled))):  # so that the first page is the youngest
            for (rank, cached), (_, own) in zip(filled[page], parts_of[page], strict=True):
                if cached is not None:
                    self._caches[rank].remove_user(cached, sequence.sequence_id)
                elif not self._caches[rank].keep(self._model.name, keys[page], own):
                    free.append((rank, own))
        return free
