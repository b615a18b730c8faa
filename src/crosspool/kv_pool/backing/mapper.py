"""Mapper: which page is mapped, unmapped or left alone next. A pure state machine: time is an argument, no driver here.

A driver thread asks for the next operation, does it, and tells the outcome (`vmm.py`). One operation is under way at a
time. Pages that a step waits for come first, then those that are expected, then those that nobody needs any more.
"""

from collections.abc import Collection, Hashable, Iterable

from crosspool.kv_pool.backing.frame_memory import FrameMemory
from crosspool.kv_pool.backing.mapped_page import MappedPage, ModelRange, PageState
from crosspool.kv_pool.backing.operations import CreateFrame, FreeRange, MapPage, Operation, ReleaseFrame, UnmapPage
from crosspool.kv_pool.backing.page_queues import PageQueues
from crosspool.kv_pool.backing.page_spots import PageSpots
from crosspool.kv_pool.backing.running_steps import RunningSteps
from crosspool.kv_pool.pool import Page

MAX_FAILURES = 5
"""Failed attempts to map one page before whoever waits for it is told."""

FIRST_RETRY_S = 0.002
LONGEST_RETRY_S = 1.0
"""How long a page rests after a failure; twice as long after each further one."""

NUM_SHED = 8
"""Idle pages that are unmapped after a failed map, since the driver may have run out of something."""


class Mapper:
    """What is to be done about the pages of one KV rank."""

    def __init__(self) -> None:
        self.num_maps = 0
        self.num_unmaps = 0
        self.num_failures = 0
        self._spots = PageSpots()
        self._memory = FrameMemory()
        self._steps = RunningSteps()
        self._held: dict[int, list[MappedPage]] = {}  # by sequence
        self._queues = PageQueues(self._spots, self._memory, self._steps)
        self._free_ranges_at_s = 0.0
        self._under_way: Operation | None = None

    def mapped(self) -> list[MappedPage]:
        """Every page that has a spot, those of removed models included."""
        return self._spots.mapped()

    @property
    def num_mapped_frames(self) -> int:
        return len(self._spots.mapped_frames)

    @property
    def num_absent_frames(self) -> int:
        """Frames whose memory was given back."""
        return self._memory.num_absent

    @property
    def has_backlog(self) -> bool:
        """Whether something is left to do, now or once a step has ended."""
        return self._queues.has_pages or bool(self._spots.retired) or self._memory.has_backlog

    def add_model(self, model: str, base: int, frames_per_page: int, num_spots: int) -> ModelRange:
        """Raises ValueError for a second model of that name."""
        return self._spots.add_range(model, base, frames_per_page, num_spots)

    def remove_model(self, model: str) -> None:
        """Its pages are unmapped and its range is freed once no step can touch them."""
        model_range = self._spots.retire_range(model)
        if model_range is None:
            return
        for page in list(model_range.pages.values()):
            if page.users:
                page.users.clear()
                page.released_at = self._steps.epoch
            self._queues.doom(page)

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None:
        self._steps.begin(step, sequence_ids)

    def end_step(self, step: Hashable) -> None:
        self._steps.end(step)

    def use(self, model: str, sequence_id: int, pages: Iterable[Page]) -> list[MappedPage]:
        """The sequence uses these pages from now on; those that are not mapped yet are urgent."""
        found = [self._page(model, page) for page in pages]
        held = self._held.setdefault(sequence_id, [])
        for page in found:
            if sequence_id not in page.users:
                page.users.add(sequence_id)
                held.append(page)
            if not page.is_mapped and not page.is_urgent:
                self._queues.want(page, is_urgent=True)
        return found

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            is_running = self._steps.may_touch(sequence_id)
            for page in self._held.pop(sequence_id, ()):
                page.users.discard(sequence_id)
                if is_running:
                    page.released_at = self._steps.epoch

    def expect(self, model: str, pages: Iterable[Page]) -> None:
        """Map these pages when nothing is more urgent. A page that is not free any more is left out."""
        model_range = self._spots.ranges.get(model)
        if model_range is None:
            return
        for page in pages:
            if not any(other.users for other in self._spots.others(model_range, page)):
                self._page(model, page)

    def give_back(self, model: str, pages: Iterable[Page]) -> None:
        """Unmap these pages when there is time. Pages that are used, or not here, stay as they are."""
        model_range = self._spots.ranges.get(model)
        if model_range is None:
            return
        for page in pages:
            found = model_range.pages.get(page)
            if found is not None and not found.users:
                self._queues.doom(found)

    def withdraw(self, frames: Iterable[int]) -> None:
        """Give back these frames' memory once they are mapped nowhere. No page has them from now on."""
        for frame in frames:
            page = self._spots.owner(frame) if self._memory.withdraw(frame) else None
            if page is not None and not page.users:
                self._queues.doom(page)

    def restore(self, frames: Iterable[int]) -> None:
        """Pages may have these frames again; those without memory get some."""
        self._memory.restore(frames)

    def is_blocked(self, page: MappedPage) -> bool:
        """Whether some of the page's frames are mapped in another spot."""
        return self._spots.is_blocked(page)

    def next_operation(self, now: float) -> Operation | None:
        """What the driver is to do now; its outcome goes to `ended` before anything else is given out."""
        if self._under_way is not None:
            return None
        self._under_way = (
            self._queues.towards_wanted(now)
            or self._memory.creation(now)
            or self._queues.unneeded(now)
            or self._freed_range(now)
            or self._memory.release(self._spots.mapped_frames, now)
        )
        match self._under_way:
            case MapPage(page):
                self._spots.occupy(page)
                page.state = PageState.MAPPING
            case UnmapPage(page):
                page.state = PageState.UNMAPPING
            case ReleaseFrame():
                self._memory.begin(self._under_way)
        return self._under_way

    def retry_s(self) -> float | None:
        """The first moment at which something that failed is tried again."""
        resting = self._queues.resting()
        if any(not model_range.pages for model_range in self._spots.retired):
            resting.append(self._free_ranges_at_s)
        if (frames_at_s := self._memory.retry_s) is not None:
            resting.append(frames_at_s)
        return min(resting, default=None)

    def ended(self, operation: Operation, error: str | None, now: float) -> None:
        """Take in how the operation under way has ended."""
        assert operation is self._under_way
        self._under_way = None
        self.num_failures += error is not None
        match operation:
            case MapPage(page):
                self._map_ended(page, error, now)
            case UnmapPage(page):
                self._unmap_ended(page, error, now)
            case FreeRange(model_range):
                if error is None:
                    self._spots.retired.remove(model_range)
                else:
                    self._free_ranges_at_s = now + LONGEST_RETRY_S
            case CreateFrame() | ReleaseFrame():
                self._memory.ended(operation, error is not None, now)

    def _page(self, model: str, page: Page) -> MappedPage:
        """The page of these frames, new or known; it is wanted from now on."""
        model_range = self._spots.ranges[model]
        found = model_range.pages.get(page)
        if found is not None and not found.is_doomed:
            return found
        for other in self._spots.others(model_range, page):
            (frame, *_) = (each for each in page if each in other.page)
            assert not other.users, f"frame {frame} of a page of {model} is in use by {sorted(other.users)}"
            self._queues.doom(other)
        if found is None:
            found = model_range.pages[page] = MappedPage(model_range, page)
            self._queues.want(found, is_urgent=False)
        found.is_doomed = False
        self._spots.claim(found)
        self._memory.restore(page)  # a step may bring frames before it is told that they are back in use
        return found

    def _freed_range(self, now: float) -> FreeRange | None:
        if now < self._free_ranges_at_s:
            return None
        return next((FreeRange(model_range) for model_range in self._spots.retired if not model_range.pages), None)

    def _map_ended(self, page: MappedPage, error: str | None, now: float) -> None:
        if error is None:
            self.num_maps += 1
            page.state, page.failures, page.is_urgent = PageState.MAPPED, 0, False
            return
        self._spots.vacate(page)
        _failed(page, now)
        self._shed()
        page.state = PageState.WANTED
        if page.is_doomed:
            self._spots.drop(page)
        elif page.failures >= MAX_FAILURES:
            page.error = error
            self._spots.drop(page)
        else:
            self._queues.want(page, is_urgent=page.is_urgent)

    def _unmap_ended(self, page: MappedPage, error: str | None, now: float) -> None:
        if error is not None:
            page.state = PageState.MAPPED
            _failed(page, now)
            self._queues.doom(page)
            return
        self.num_unmaps += 1
        self._spots.vacate(page)
        page.state, page.failures, page.not_before_s = PageState.WANTED, 0, 0.0
        if page.is_doomed or (not page.users and not page.is_urgent):
            self._spots.drop(page)
        else:  # wanted again while it was being unmapped
            self._queues.want(page, is_urgent=bool(page.users))

    def _shed(self) -> None:
        """Doom a few idle pages."""
        for page, _ in zip(self._spots.idle(), range(NUM_SHED), strict=False):
            self._queues.doom(page)


def _failed(page: MappedPage, now: float) -> None:
    page.failures += 1
    page.not_before_s = now + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** (page.failures - 1))
