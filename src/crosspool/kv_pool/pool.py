"""KVPool: the frames of one KV rank, handed out as pages to all its models from one budget."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from crosspool.units import ceil_div

Page = tuple[int, ...]
"""The frames of `page_tokens` tokens of all layers of one model; the entry of a block table."""


BATCH = 16
"""Pages that are taken off an idle model's shelf at once, when no other frames are left."""


@dataclass(slots=True)
class _Share:
    """One model's pages: those in use, by first frame, and whole free ones that it gets again, the youngest last."""

    width: int
    held: dict[int, Page] = field(default_factory=dict)
    shelf: deque[Page] = field(default_factory=deque)
    turn: int = 0  # when it last took a page; the lowest gives its shelf up first


class KVPool:
    """Counts and owners of frames; holds no memory itself (`backing/` and the workers do).

    Frame 0 is never handed out: masked lanes read and write it. A frame has one owner at a time; a page is made of
    any free frames, so the pool does not fragment. A full pool is a scheduling outcome: `allocate` then returns None.

    A page that comes back stays whole on its model's *shelf*, so that the model gets the same page again: where frames
    are mapped (`backing/vmm.py`) it still is. Frames that lie on a shelf are free for every model: when no others are
    left, the shelf of the model that has taken nothing for longest is taken apart. Cost of a page: constant.
    """

    def __init__(self, num_frames: int, first_frame: int = 0) -> None:
        """first_frame: number of frame 0 where several pools share one numbering."""
        if num_frames < 2:
            raise ValueError(f"a KV pool of {num_frames} frames has none to hand out beside frame 0; give it 2 or more")
        self.num_frames = num_frames
        self.first_frame = first_frame
        self.num_free = num_frames - 1
        self._fresh = first_frame + 1  # the first frame that was never handed out
        self._end = first_frame + num_frames
        self._loose: list[int] = []  # a stack: frames in recent use are handed out first
        self._shares: dict[str, _Share] = {}
        self._turn = 0
        self._withdrawn: list[int] = []
        self.taken_apart: list[tuple[str, Page]] | None = None
        """Where pages of shelves that were taken apart are noted down, for whoever wants to know (`ahead.py`)."""

    @property
    def budget(self) -> int:
        """Frames that can be handed out: all but frame 0."""
        return self.num_frames - 1

    @property
    def withdrawn(self) -> tuple[int, ...]:
        """Frames that are not handed out until they are restored: nobody's, and not free."""
        return tuple(self._withdrawn)

    @property
    def num_withdrawn(self) -> int:
        return len(self._withdrawn)

    @property
    def num_loose(self) -> int:
        """Free frames that lie on no shelf."""
        return len(self._loose) + self._end - self._fresh

    def used(self, model: str) -> int:
        """Frames in the model's pages."""
        share = self._shares[model]
        return len(share.held) * share.width

    def frames_per_page(self, model: str) -> int:
        return self._shares[model].width

    def num_shelved(self, model: str) -> int:
        """Whole free pages that the model gets before any other."""
        return len(self._shares[model].shelf)

    def add_model(self, model: str, frames_per_page: int) -> None:
        """Raises ValueError for a second model of that name or a page of no frames."""
        if model in self._shares:
            raise ValueError(f"the KV pool already has a model {model}; remove it first")
        if frames_per_page < 1:
            raise ValueError(f"a page of {model} has {frames_per_page} frames; it must have at least 1")
        self._shares[model] = _Share(frames_per_page)

    def remove_model(self, model: str) -> None:
        """Raises ValueError while the model holds pages."""
        if self._shares[model].held:
            raise ValueError(f"model {model} still holds {self.used(model)} frames; free its pages first")
        self.unshelve(model)
        del self._shares[model]

    def allocate(self, model: str, num_pages: int) -> tuple[Page, ...] | None:
        """`num_pages` pages for the model, or None (and nothing taken) if not all of them are free."""
        share = self._shares[model]
        num_frames = num_pages * share.width
        if num_frames > self.num_free:
            return None
        self.num_free -= num_frames
        self._turn += 1
        share.turn = self._turn
        shelf, held = share.shelf, share.held
        pages: list[Page] = []
        while shelf and len(pages) < num_pages:
            pages.append(shelf.pop())
        if len(pages) < num_pages:
            self._make_pages(num_pages - len(pages), share.width, pages)
        for page in pages:
            assert page[0] not in held, f"frame {page[0]} handed out twice"
            held[page[0]] = page
        return tuple(pages)

    def free(self, model: str, pages: Iterable[Page], *, was_used: bool = True) -> None:
        """Take pages back. No step in flight may use them. Those that no step has used go on no shelf."""
        share = self._shares[model]
        held, shelf = share.held, share.shelf
        for page in pages:
            found = held.pop(page[0], None)
            assert found == page, f"{model} frees page {page}, which belongs to {self._owner(page)}"
            if was_used:
                shelf.append(page)
            else:
                self._loose.extend(page)
            self.num_free += share.width

    def stock(self, model: str, num_pages: int) -> tuple[Page, ...]:
        """Put up to `num_pages` pages of loose frames on the model's shelf, under those it has; they are still free."""
        share = self._shares[model]
        made: list[Page] = []
        self._make_pages(min(num_pages, self.num_loose // share.width), share.width, made)
        share.shelf.extendleft(made)
        return tuple(made)

    def unshelve(self, model: str, num_pages: int | None = None) -> tuple[Page, ...]:
        """Take the oldest pages off the model's shelf, all of them by default; their frames become loose."""
        shelf = self._shares[model].shelf
        count = len(shelf) if num_pages is None else min(num_pages, len(shelf))
        pages = tuple(shelf.popleft() for _ in range(count))
        for page in pages:
            self._loose.extend(page)
        return pages

    def withdraw(self, num_frames: int) -> tuple[int, ...]:
        """Take up to `num_frames` free frames out of use, those on shelves last; returns them."""
        count = min(num_frames, self.num_free)
        if count > self.num_loose:
            self._take_apart_until(count)
        while len(self._loose) < count:
            self._loose.append(self._fresh)
            self._fresh += 1
        frames = tuple(self._loose[len(self._loose) - count :])
        del self._loose[len(self._loose) - count :]
        self._withdrawn.extend(frames)
        self.num_free -= count
        return frames

    def restore(self, num_frames: int) -> tuple[int, ...]:
        """Bring frames that were withdrawn back into use, the last ones first; returns them."""
        first = max(0, len(self._withdrawn) - num_frames)
        frames = tuple(self._withdrawn[first:])
        del self._withdrawn[first:]
        self._loose.extend(frames)
        self.num_free += len(frames)
        return frames

    def _take_apart_until(self, num_loose: int) -> None:
        while self.num_loose < num_loose:
            self._take_apart(num_loose - self.num_loose)

    def _make_pages(self, num_pages: int, width: int, pages: list[Page]) -> None:
        """Append pages of free frames. The caller knows that there are enough."""
        loose = self._loose
        for _ in range(num_pages):
            if len(loose) >= width:
                pages.append(tuple(loose[-width:]))
                del loose[-width:]
            elif self._end - self._fresh + len(loose) >= width:
                first, self._fresh = self._fresh, self._fresh + width - len(loose)
                pages.append((*loose, *range(first, self._fresh)))
                loose.clear()
            else:
                self._take_apart(width)
                self._make_pages(1, width, pages)

    def _take_apart(self, num_frames: int) -> None:
        """Make frames of shelves loose, at least `num_frames`: a batch, since finding the idlest model has its cost."""
        shelved = ((name, share) for name, share in self._shares.items() if share.shelf)
        name, idle = min(shelved, key=lambda found: found[1].turn)
        for _ in range(min(len(idle.shelf), max(BATCH, ceil_div(num_frames, idle.width)))):
            page = idle.shelf.popleft()
            self._loose.extend(page)
            if self.taken_apart is not None:
                self.taken_apart.append((name, page))

    def _owner(self, page: Page) -> str | None:
        """The model that holds any of the page's frames."""
        frames = set(page)
        for name, share in self._shares.items():
            if any(not frames.isdisjoint(held) for held in share.held.values()):
                return name
        return None
