"""SplitPages: the pages of a model whose KV is split over KV ranks, by tokens or by heads.

A sequence sets aside, on every rank, all that it may reach there, whatever the admission policy: so it never waits for
a page of one rank while it holds those of another, and each rank's budget can be safe on its own (`admission.py`).
"""

from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass

from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.engine.lengths import frames_for
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.engine.split_prefix import FoundPrefix, Part, SplitPrefix
from crosspool.kv_pool.pool import Page
from crosspool.kv_pool.split import spread_pages
from crosspool.units import ceil_div

NOTHING_FOUND = FoundPrefix()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where one sequence's pages lie, the cached ones that it begins with included."""

    owners: tuple[int, ...] | None  # the rank of each page it may reach; None: every page has a part on each rank
    claims: tuple[int, ...]  # frames it claims on each rank: all that it may reach but those that others hold too
    had: tuple[int, ...]  # of these, frames it has from the beginning


class SplitPages:
    """The same interface as `KVRankPages` for the sequences of one model; `ranks` are its KV ranks in order."""

    prefix: PrefixPages | None = None  # what it has is no matter of one rank's cache

    def __init__(self, model: ServedModel, ranks: Items[KVRankPages]) -> None:
        self._model = model
        self._ranks = ranks
        self._layouts: dict[int, _Layout] = {}
        self._prefix = SplitPrefix(model, ranks) if ranks[0].prefix is not None else None

    @property
    def is_stalled(self) -> bool:
        """Whether some sequence waits for a page of one of the ranks."""
        return any(pages.stalled for pages in self._ranks)

    def admits(self, sequence: Sequence) -> bool:
        found = self._find(sequence)
        layout = self._layout(sequence, found)
        if layout is None:
            return False
        with self._prefix.lent(found) if self._prefix is not None else nullcontext():
            places = zip(self._ranks, layout.claims, strict=True)
            return all(pages.aside.admits(self._model.name, count) for pages, count in places)

    def is_capped(self, sequence: Sequence) -> bool:
        """Whether its model's ceiling keeps it out, however much is free."""
        ceilings = [pages.room_under_ceiling(self._model.name) for pages in self._ranks]
        return self._arranged(sequence, ceilings) is None

    def is_floored(self, sequence: Sequence) -> bool:
        """Whether what is kept for its model holds it."""
        floors = [pages.room_in_floor(self._model.name) for pages in self._ranks]
        return self._arranged(sequence, floors) is not None

    def admit(self, sequence: Sequence) -> None:
        found = self._find(sequence)
        layout = self._layout(sequence, found)
        assert layout is not None, f"sequence {sequence.sequence_id} was admitted without room"
        self._layouts[sequence.sequence_id] = layout
        if self._prefix is not None:
            self._prefix.use(sequence, found)
            sequence.table.extend(found.tables)
        for pages, count, had in zip(self._ranks, layout.claims, layout.had, strict=True):
            pages.aside.open(sequence.sequence_id, self._model.name, count, had)
        self._extend(sequence, sequence.num_tokens)

    def started(self, sequence: Sequence) -> None:
        """The sequence's first step is about to be handed out."""
        if self._prefix is not None:
            self._prefix.started(sequence)

    def step_ended(self, sequence: Sequence) -> None:
        """A step has written slots of the sequence: `num_cached_tokens` of them are whole."""
        if self._prefix is not None:
            self._prefix.note_filled(sequence, self._parts(sequence, sequence.table.pages))

    def ensure_slot(self, sequence: Sequence) -> bool:
        """Give the sequence a slot for one token more than it has written; it never has to wait."""
        self._extend(sequence, sequence.num_cached_tokens + 1)
        return True

    def ensure_slot_ahead(self, sequence: Sequence, count: int = 1) -> bool:
        """As `ensure_slot`, of `count` slots behind those that steps in flight write."""
        self._extend(sequence, sequence.num_cached_tokens + sequence.num_ahead + count)
        return True

    def stop_growing(self, sequence: Sequence) -> None:
        """The sequence has ended while a step in flight uses its pages: only those stay claimed."""
        for pages in self._ranks:
            pages.aside.stop_growing(sequence.sequence_id)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's pages back. No step in flight may use them."""
        parts = self._parts(sequence, sequence.table.clear())
        for pages in self._ranks:
            pages.aside.close(sequence.sequence_id)
        if self._prefix is None:
            free = [part for page in parts for part in page]
        else:
            free = self._prefix.leave(sequence, parts)
        for rank, own in free:
            self._ranks[rank].take_back(self._model.name, [own])
        del self._layouts[sequence.sequence_id]

    def _find(self, sequence: Sequence) -> FoundPrefix:
        return FoundPrefix() if self._prefix is None else self._prefix.find(sequence)

    def _layout(self, sequence: Sequence, found: FoundPrefix) -> _Layout | None:
        """Where its pages would go now; None if they do not fit."""
        return self._arranged(sequence, [pages.room(self._model.name) for pages in self._ranks], found)

    def _arranged(self, sequence: Sequence, room: Items[int], found: FoundPrefix = NOTHING_FOUND) -> _Layout | None:
        """The same where `room` is what may be promised on each rank."""
        width, ranks = self._model.frames_per_page, range(len(room))
        in_use = [0] * len(room) if self._prefix is None else self._prefix.in_use(found)
        had = [len(found.on(rank)) * width - in_use[rank] for rank in ranks]
        if self._model.kv_split == "heads":
            needed = frames_for(self._model, sequence.max_tokens)
            claims = tuple(needed - in_use[rank] for rank in ranks)
            return _Layout(None, claims, tuple(had)) if all(claims[rank] <= room[rank] for rank in ranks) else None
        num_pages = ceil_div(sequence.max_tokens, self._model.page_tokens) - len(found.pages)
        new = spread_pages(num_pages, width, [room[rank] - had[rank] for rank in ranks])
        if new is None or any(had[rank] > room[rank] for rank in ranks):
            return None
        claims = tuple(had[rank] + new.count(rank) * width for rank in ranks)
        return _Layout((*(page[0][0] for page in found.pages), *new), claims, tuple(had))

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        missing = sequence.table.num_missing(num_tokens)
        if missing == 0:
            return
        key, name, width = sequence.sequence_id, self._model.name, self._model.frames_per_page
        owners = self._layouts[key].owners
        if owners is None:
            parts = [pages.aside.hand_out(key, name, missing, width) for pages in self._ranks]
            sequence.table.extend(tuple(sum(page, ()) for page in zip(*parts, strict=True)))
            return
        first = len(sequence.table.pages)
        new = [self._ranks[rank].aside.hand_out(key, name, 1, width)[0] for rank in owners[first : first + missing]]
        sequence.table.extend(tuple(new))

    def _parts(self, sequence: Sequence, pages: Items[Page]) -> list[list[Part]]:
        """The frames of each of the sequence's pages by rank."""
        owners, width = self._layouts[sequence.sequence_id].owners, self._model.frames_per_page
        if owners is not None:
            return [[(owners[idx], page)] for idx, page in enumerate(pages)]
        return [[(rank, page[rank * width : (rank + 1) * width]) for rank in range(len(self._ranks))] for page in pages]


def split_reach(model: ServedModel, frames: Items[int]) -> int:
    """Frames by which a split model's capacity is counted, where it can come to hold `frames` on each rank."""
    if model.kv_split == "heads":
        return min(frames)
    return sum(count // model.frames_per_page for count in frames) * model.frames_per_page
