"""Mapper: which page is mapped, unmapped or left alone next. A pure state machine: time is an argument, no driver here.

A driver thread asks for the next operation, does it, and tells the outcome (`vmm.py`). One operation is under way at a
time. Pages that a step waits for come first, then those that are expected, then those that nobody needs any more.

A frame is mapped in one place at a time, so contents go with frames, never with addresses. A page leaves its place only
when no sequence uses it. If a user left while a step of it was running, every step that had begun by then must have
ended too (their *epochs* are over): a step that was given up may still run on a device.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from itertools import islice

from crosspool.kv_pool.backing.mapped_page import MappedPage, ModelRange, PageState
from crosspool.kv_pool.pool import Page

MAX_FAILURES = 5
"""Failed attempts to map one page before whoever waits for it is told."""

FIRST_RETRY_S = 0.002
LONGEST_RETRY_S = 1.0
"""How long a page rests after a failure; twice as long after each further one."""

NUM_LOOKED_AT = 32
"""Pages nobody needs that are looked at for one operation: the oldest can leave first, as a rule."""

NUM_SHED = 8
"""Idle pages that are unmapped after a failed map, since the driver may have run out of something."""


@dataclass(frozen=True, slots=True)
class MapPage:
    page: MappedPage


@dataclass(frozen=True, slots=True)
class UnmapPage:
    page: MappedPage


@dataclass(frozen=True, slots=True)
class FreeRange:
    place: ModelRange


@dataclass(frozen=True, slots=True)
class CreateFrame:
    frame: int


@dataclass(frozen=True, slots=True)
class ReleaseFrame:
    frame: int


Operation = MapPage | UnmapPage | FreeRange | CreateFrame | ReleaseFrame


@dataclass(frozen=True, slots=True)
class _Running:
    """A step: the epoch in which it began, and whose pages it may touch."""

    epoch: int
    sequence_ids: frozenset[int]


class Mapper:
    """Places of all pages of one KV rank, and what is to be done about them."""

    def __init__(self) -> None:
        self.num_maps = 0
        self.num_unmaps = 0
        self.num_failures = 0
        self._ranges: dict[str, ModelRange] = {}
        self._retired: list[ModelRange] = []
        self._claims: dict[int, MappedPage] = {}  # by frame: the page that has it now, mapped or not
        self._at: dict[int, MappedPage] = {}  # by frame: the page in whose place it is mapped
        self._held: dict[int, list[MappedPage]] = {}  # by sequence
        self._urgent: deque[MappedPage] = deque()
        self._expected: deque[MappedPage] = deque()
        self._doomed: deque[MappedPage] = deque()
        self._active: dict[Hashable, _Running] = {}
        self._epoch = 0
        self._free_ranges_at_s = 0.0
        self._absent: set[int] = set()  # frames without memory
        self._leaving: dict[int, None] = {}  # frames whose memory is to go, in order
        self._coming: dict[int, None] = {}  # absent ones that are to have some again
        self._frames_at_s = 0.0
        self._under_way: Operation | None = None

    def mapped(self) -> list[MappedPage]:
        """Every page that has a place, those of removed models included."""
        return list({id(page): page for page in self._at.values()}.values())

    @property
    def num_mapped_frames(self) -> int:
        return len(self._at)

    @property
    def num_absent_frames(self) -> int:
        """Frames whose memory was given back."""
        return len(self._absent)

    @property
    def has_backlog(self) -> bool:
        """Whether something is left to do, now or once a step has ended."""
        pages = self._urgent or self._expected or self._doomed or self._retired
        return bool(pages or self._leaving or self._coming)

    def add_model(self, model: str, base: int, frames_per_page: int, num_slots: int) -> ModelRange:
        """Raises ValueError for a second model of that name."""
        if model in self._ranges:
            raise ValueError(f"model {model} has a range already; remove it first")
        self._ranges[model] = ModelRange(model, base, frames_per_page, list(range(num_slots - 1, -1, -1)))
        return self._ranges[model]

    def remove_model(self, model: str) -> None:
        """Its pages are unmapped and its range is freed once no step can touch them."""
        place = self._ranges.pop(model, None)
        if place is None:
            return
        place.is_retired = True
        self._retired.append(place)
        for page in list(place.pages.values()):
            if page.users:
                page.users.clear()
                page.released_at = self._epoch
            self._doom(page)

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None:
        self._epoch += 1
        self._active[step] = _Running(self._epoch, frozenset(sequence_ids))

    def end_step(self, step: Hashable) -> None:
        self._active.pop(step, None)

    def use(self, model: str, sequence_id: int, pages: Iterable[Page]) -> list[MappedPage]:
        """The sequence uses these pages from now on; those that are not mapped yet are urgent."""
        found = [self._page(model, page) for page in pages]
        held = self._held.setdefault(sequence_id, [])
        for page in found:
            if sequence_id not in page.users:
                page.users.add(sequence_id)
                held.append(page)
            if not page.is_mapped and not page.is_urgent:
                page.is_urgent = True
                self._urgent.append(page)
        return found

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            is_running = any(sequence_id in step.sequence_ids for step in self._active.values())
            for page in self._held.pop(sequence_id, ()):
                page.users.discard(sequence_id)
                if is_running:
                    page.released_at = self._epoch

    def expect(self, model: str, pages: Iterable[Page]) -> None:
        """Map these pages when nothing is more urgent. A page that is not free any more is left out."""
        for page in pages if model in self._ranges else ():
            others = (self._claims.get(frame) for frame in page)
            if not any(other is not None and other.users and other.page != page for other in others):
                self._page(model, page)

    def give_back(self, model: str, pages: Iterable[Page]) -> None:
        """Unmap these pages when there is time. Pages that are used, or not here, stay as they are."""
        place = self._ranges.get(model)
        if place is None:
            return
        for page in pages:
            found = place.pages.get(page)
            if found is not None and not found.users:
                self._doom(found)

    def withdraw(self, frames: Iterable[int]) -> None:
        """Give back these frames' memory once they are mapped nowhere. No page has them from now on."""
        for frame in frames:
            self._coming.pop(frame, None)
            if frame in self._absent:
                continue
            self._leaving[frame] = None
            page = self._claims.get(frame)
            if page is not None and not page.users:
                self._doom(page)

    def restore(self, frames: Iterable[int]) -> None:
        """Pages may have these frames again; those without memory get some."""
        for frame in frames:
            if frame in self._leaving:
                del self._leaving[frame]
            elif frame in self._absent:
                self._coming[frame] = None

    def is_blocked(self, page: MappedPage) -> bool:
        """Whether some of the page's frames are mapped in another place."""
        return any(self._at.get(frame, page) is not page for frame in page.page)

    def next_operation(self, now: float) -> Operation | None:
        """What the driver is to do now; its outcome goes to `ended` before anything else is given out."""
        if self._under_way is None:
            self._under_way = (
                self._towards_wanted(now)
                or self._created(now)
                or self._unneeded(now)
                or self._freed_range(now)
                or self._released(now)
            )
        else:
            return None
        match self._under_way:
            case MapPage(page):
                page.slot = page.place.free_slots.pop()
                page.state = PageState.MAPPING
                for frame in page.page:
                    self._at[frame] = page
            case UnmapPage(page):
                page.state = PageState.UNMAPPING
            case ReleaseFrame(frame):  # whoever wants it meanwhile waits until it has memory again
                del self._leaving[frame]
                self._absent.add(frame)
        return self._under_way

    def retry_s(self) -> float | None:
        """The first moment at which something that failed is tried again."""
        resting = [page.not_before_s for queue in self._queues for page in queue if page.failures]
        if any(not place.pages for place in self._retired):
            resting.append(self._free_ranges_at_s)
        if self._frames_at_s and (self._coming or self._leaving):
            resting.append(self._frames_at_s)
        return min(resting, default=None)

    def ended(self, operation: Operation, error: str | None, now: float) -> None:
        """Take in how the operation under way has ended."""
        assert operation is self._under_way
        self._under_way = None
        match operation:
            case MapPage(page):
                self._map_ended(page, error, now)
            case UnmapPage(page):
                self._unmap_ended(page, error, now)
            case FreeRange(place):
                if error is None:
                    self._retired.remove(place)
                else:
                    self.num_failures += 1
                    self._free_ranges_at_s = now + LONGEST_RETRY_S

            case CreateFrame(frame):
                self._frame_ended(error, now)
                if error is None:
                    self._absent.discard(frame)
                    if frame in self._coming:
                        del self._coming[frame]
                    else:  # withdrawn again meanwhile
                        self._leaving[frame] = None
            case ReleaseFrame(frame):
                self._frame_ended(error, now)
                if error is not None:
                    self._absent.discard(frame)
                    if frame in self._coming:
                        del self._coming[frame]
                    else:
                        self._leaving[frame] = None

    def _frame_ended(self, error: str | None, now: float) -> None:
        self._frames_at_s = 0.0 if error is None else now + LONGEST_RETRY_S
        self.num_failures += error is not None

    @property
    def _queues(self) -> tuple[deque[MappedPage], ...]:
        return self._urgent, self._expected, self._doomed

    def _page(self, model: str, page: Page) -> MappedPage:
        """The page of these frames, new or known; it is wanted from now on."""
        place = self._ranges[model]
        found = place.pages.get(page)
        if found is not None and not found.is_doomed:
            return found
        for frame in page:
            other = self._claims.get(frame)
            if other is not None and other is not found:
                assert not other.users, f"frame {frame} of a page of {model} is in use by {sorted(other.users)}"
                self._doom(other)
        if found is None:
            found = place.pages[page] = MappedPage(place, page)
            self._expected.append(found)
        found.is_doomed = False
        for frame in page:
            self._claims[frame] = found
        self.restore(page)  # a step may bring frames before it is told that they are back in use
        return found

    def _doom(self, page: MappedPage) -> None:
        if page.state is PageState.WANTED:
            self._drop(page)
        elif not page.is_doomed:
            page.is_doomed = True
            self._doomed.append(page)

    def _drop(self, page: MappedPage) -> None:
        page.state = PageState.GONE
        if page.place.pages.get(page.page) is page:
            del page.place.pages[page.page]
        for frame in page.page:
            if self._claims.get(frame) is page:
                del self._claims[frame]

    def _can_leave(self, page: MappedPage, now: float) -> bool:
        if not page.is_mapped or page.users or now < page.not_before_s:
            return False
        return all(step.epoch > page.released_at for step in self._active.values())

    def _created(self, now: float) -> CreateFrame | None:
        if not self._coming or now < self._frames_at_s:
            return None
        return CreateFrame(next(iter(self._coming)))

    def _released(self, now: float) -> ReleaseFrame | None:
        if now < self._frames_at_s:
            return None
        for frame in islice(self._leaving, NUM_LOOKED_AT):
            if frame not in self._at:
                return ReleaseFrame(frame)
        return None

    def _towards_wanted(self, now: float) -> Operation | None:
        """Map the first wanted page that can be, or make room for it."""
        for queue in (self._urgent, self._expected):
            for _ in range(len(queue)):
                page = queue[0]
                if page.state is not PageState.WANTED or (queue is self._expected and page.is_urgent):
                    queue.popleft()
                    continue
                lacking = [frame for frame in page.page if frame in self._absent]
                if lacking:
                    if lacking[0] in self._coming and now >= self._frames_at_s:
                        return CreateFrame(lacking[0])
                    queue.rotate(-1)
                    continue
                blockers = {id(other): other for frame in page.page if (other := self._at.get(frame)) is not None}
                for other in blockers.values():
                    if self._can_leave(other, now):
                        return UnmapPage(other)
                if not blockers and now >= page.not_before_s:
                    queue.popleft()
                    return MapPage(page)
                queue.rotate(-1)
        return None

    def _unneeded(self, now: float) -> UnmapPage | None:
        for _ in range(min(NUM_LOOKED_AT, len(self._doomed))):
            page = self._doomed.popleft()
            if not page.is_doomed or page.state is PageState.GONE:
                continue
            self._doomed.append(page)
            if self._can_leave(page, now):
                return UnmapPage(page)
        return None

    def _freed_range(self, now: float) -> FreeRange | None:
        if now < self._free_ranges_at_s:
            return None
        return next((FreeRange(place) for place in self._retired if not place.pages), None)

    def _map_ended(self, page: MappedPage, error: str | None, now: float) -> None:
        if error is None:
            self.num_maps += 1
            page.state, page.failures, page.is_urgent = PageState.MAPPED, 0, False
            return
        self._vacate(page)
        self._failed(page, now)
        self._shed()
        page.state = PageState.WANTED
        if page.is_doomed:
            self._drop(page)
        elif page.failures >= MAX_FAILURES:
            page.error = error
            self._drop(page)
        else:
            (self._urgent if page.is_urgent else self._expected).append(page)

    def _unmap_ended(self, page: MappedPage, error: str | None, now: float) -> None:
        if error is not None:
            page.state = PageState.MAPPED
            self._failed(page, now)
            self._doom(page)
            return
        self.num_unmaps += 1
        self._vacate(page)
        page.state, page.failures, page.not_before_s = PageState.WANTED, 0, 0.0
        if page.is_doomed or (not page.users and not page.is_urgent):
            self._drop(page)
        else:  # wanted again while it was being unmapped
            page.is_urgent = bool(page.users)
            (self._urgent if page.is_urgent else self._expected).append(page)

    def _vacate(self, page: MappedPage) -> None:
        page.place.free_slots.append(page.slot)
        page.slot = -1
        for frame in page.page:
            del self._at[frame]

    def _failed(self, page: MappedPage, now: float) -> None:
        self.num_failures += 1
        page.failures += 1
        page.not_before_s = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** (page.failures - 1))

    def _shed(self) -> None:
        """Doom a few idle pages."""
        idle = (
            page
            for place in self._ranges.values()
            for page in place.pages.values()
            if page.is_mapped and not page.users and not page.is_doomed
        )
        for page, _ in zip(idle, range(NUM_SHED), strict=False):
            self._doom(page)
