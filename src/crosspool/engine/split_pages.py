"""SplitPages: the pages of a model whose KV is split over KV ranks, by tokens or by heads.

A sequence sets aside, on every rank, all that it may reach there, whatever the admission policy: so it never waits for
a page of one rank while it holds those of another, and each rank's budget can be safe on its own (`admission.py`). Its
prefixes are not cached.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.engine.admission import frames_for
from crosspool.engine.pages import KVRankPages
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.pool import Page
from crosspool.kv_pool.split import spread_pages
from crosspool.units import ceil_div


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where one sequence's pages lie."""

    owners: tuple[int, ...] | None  # the rank of each page it may reach; None: every page has a part on each rank
    frames: tuple[int, ...]  # set aside on each rank


class SplitPages:
    """The same interface as `KVRankPages` for the sequences of one model; `ranks` are its KV ranks in order."""

    prefix: PrefixPages | None = None

    def __init__(self, model: ServedModel, ranks: Items[KVRankPages]) -> None:
        self._model = model
        self._ranks = ranks
        self._layouts: dict[int, _Layout] = {}

    @property
    def is_stalled(self) -> bool:
        """Whether some sequence waits for a page of one of the ranks."""
        return any(pages.stalled for pages in self._ranks)

    def admits(self, sequence: Sequence) -> bool:
        layout = self._layout(sequence)
        return layout is not None and all(
            pages.can_set_aside(self._model.name, count)
            for pages, count in zip(self._ranks, layout.frames, strict=True)
        )

    def is_capped(self, sequence: Sequence) -> bool:
        """Whether its model's ceiling keeps it out, however much is free."""
        ceilings = [pages.room_under_ceiling(self._model.name) for pages in self._ranks]
        return self._arranged(sequence, ceilings) is None

    def is_floored(self, sequence: Sequence) -> bool:
        """Whether what is kept for its model holds it."""
        floors = [pages.room_in_floor(self._model.name) for pages in self._ranks]
        return self._arranged(sequence, floors) is not None

    def admit(self, sequence: Sequence) -> None:
        layout = self._layout(sequence)
        assert layout is not None, f"sequence {sequence.sequence_id} was admitted without room"
        self._layouts[sequence.sequence_id] = layout
        for pages, count in zip(self._ranks, layout.frames, strict=True):
            pages.set_aside(sequence.sequence_id, self._model.name, count)
        self._extend(sequence, sequence.num_tokens)

    def started(self, sequence: Sequence) -> None:
        """Nothing to do: no prefix is cached."""

    def step_ended(self, sequence: Sequence) -> None:
        """Nothing to do: no prefix is cached."""

    def ensure_slot(self, sequence: Sequence) -> bool:
        """Give the sequence a slot for one token more than it has written; it never has to wait."""
        self._extend(sequence, sequence.num_cached_tokens + 1)
        return True

    def ensure_slot_ahead(self, sequence: Sequence) -> bool:
        """As `ensure_slot` with one slot more for each step in flight."""
        self._extend(sequence, sequence.num_cached_tokens + sequence.num_steps + 1)
        return True

    def stop_growing(self, sequence: Sequence) -> None:
        """The sequence has ended while a step in flight uses its pages: only those stay claimed."""
        for pages in self._ranks:
            pages.give_up_aside(sequence.sequence_id)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's pages back. No step in flight may use them."""
        layout = self._layouts.pop(sequence.sequence_id)
        parts: list[list[Page]] = [[] for _ in self._ranks]
        for idx, page in enumerate(sequence.table.clear()):
            for rank, part in self._parts(layout, idx, page):
                parts[rank].append(part)
        for pages, own in zip(self._ranks, parts, strict=True):
            pages.take_back(sequence.sequence_id, self._model.name, own)

    def reach(self, frames: Items[int]) -> int:
        """Frames by which the model's capacity is counted, where it can come to hold `frames` on each rank."""
        width = self._model.frames_per_page
        if self._model.kv_split == "heads":
            return min(frames)
        return sum(count // width for count in frames) * width

    def _layout(self, sequence: Sequence) -> _Layout | None:
        """Where its pages would go now; None if they do not fit."""
        return self._arranged(sequence, [pages.room(self._model.name) for pages in self._ranks])

    def _arranged(self, sequence: Sequence, room: Items[int]) -> _Layout | None:
        width = self._model.frames_per_page
        if self._model.kv_split == "heads":
            needed = frames_for(self._model, sequence.max_tokens)
            return _Layout(None, (needed,) * len(room)) if needed <= min(room) else None
        num_pages = ceil_div(sequence.max_tokens, self._model.page_tokens)
        owners = spread_pages(num_pages, width, room)
        if owners is None:
            return None
        return _Layout(owners, tuple(owners.count(rank) * width for rank in range(len(room))))

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        missing = sequence.table.num_missing(num_tokens)
        if missing == 0:
            return
        key, name = sequence.sequence_id, self._model.name
        owners = self._layouts[key].owners
        if owners is None:
            parts = [pages.hand_out(key, name, missing) for pages in self._ranks]
            sequence.table.extend(tuple(sum(page, ()) for page in zip(*parts, strict=True)))
            return
        first = len(sequence.table.pages)
        new = [self._ranks[rank].hand_out(key, name, 1)[0] for rank in owners[first : first + missing]]
        sequence.table.extend(tuple(new))

    def _parts(self, layout: _Layout, idx: int, page: Page) -> list[tuple[int, Page]]:
        """The frames of page `idx` by rank."""
        if layout.owners is not None:
            return [(layout.owners[idx], page)]
        width = self._model.frames_per_page
        return [(rank, page[rank * width : (rank + 1) * width]) for rank in range(len(self._ranks))]
