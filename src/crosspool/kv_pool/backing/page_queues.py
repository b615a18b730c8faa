"""PageQueues: pages that are to be mapped or unmapped, and which of them the driver can do something for now. Pure."""

from collections import deque

from crosspool.kv_pool.backing.frame_memory import FrameMemory
from crosspool.kv_pool.backing.mapped_page import MappedPage, PageState
from crosspool.kv_pool.backing.operations import MapPage, Operation, UnmapPage
from crosspool.kv_pool.backing.page_spots import PageSpots
from crosspool.kv_pool.backing.running_steps import RunningSteps

NUM_LOOKED_AT = 32
"""Pages nobody needs that are looked at for one operation: the oldest can leave first, as a rule."""


class PageQueues:
    """Pages that a step waits for, pages that are expected, and *doomed* ones, which are to be unmapped.

    A page leaves its spot only when no sequence uses it. If a user left while a step of it was running, every step
    that had begun by then must have ended too: a step that was given up may still run on a device.
    """

    def __init__(self, spots: PageSpots, memory: FrameMemory, steps: RunningSteps) -> None:
        self._spots, self._memory, self._steps = spots, memory, steps
        self._urgent: deque[MappedPage] = deque()
        self._expected: deque[MappedPage] = deque()
        self._doomed: deque[MappedPage] = deque()

    @property
    def has_pages(self) -> bool:
        return bool(self._urgent or self._expected or self._doomed)

    def resting(self) -> list[float]:
        """Of pages that failed, when each is tried again."""
        queues = (self._urgent, self._expected, self._doomed)
        return [page.not_before_s for queue in queues for page in queue if page.failures]

    def want(self, page: MappedPage, *, is_urgent: bool) -> None:
        """The page is to be mapped."""
        page.is_urgent = is_urgent
        (self._urgent if is_urgent else self._expected).append(page)

    def doom(self, page: MappedPage) -> None:
        """Unmap the page as soon as nothing can touch it; forget one that is only wanted."""
        if page.state is PageState.WANTED:
            self._spots.drop(page)
        elif not page.is_doomed:
            page.is_doomed = True
            self._doomed.append(page)

    def towards_wanted(self, now: float) -> Operation | None:
        """Map the first wanted page that can be, or make room for it."""
        for queue in (self._urgent, self._expected):
            for _ in range(len(queue)):
                page = queue[0]
                if page.state is not PageState.WANTED or (queue is self._expected and page.is_urgent):
                    queue.popleft()
                    continue
                operation = self._towards(page, now)
                if operation is not None:
                    if isinstance(operation, MapPage):
                        queue.popleft()
                    return operation
                queue.rotate(-1)
        return None

    def unneeded(self, now: float) -> UnmapPage | None:
        """Unmap a doomed page."""
        for _ in range(min(NUM_LOOKED_AT, len(self._doomed))):
            page = self._doomed.popleft()
            if not page.is_doomed or page.state is PageState.GONE:
                continue
            self._doomed.append(page)
            if self._can_leave(page, now):
                return UnmapPage(page)
        return None

    def _towards(self, page: MappedPage, now: float) -> Operation | None:
        """What the page needs first: memory of its frames, that other pages leave them, or to be mapped."""
        lacking = self._memory.first_absent(page.page)
        if lacking is not None:
            return self._memory.creation_of(lacking, now)
        blockers = self._spots.blockers(page)
        leaving = next((other for other in blockers if self._can_leave(other, now)), None)
        if leaving is not None:
            return UnmapPage(leaving)
        return MapPage(page) if not blockers and now >= page.not_before_s else None

    def _can_leave(self, page: MappedPage, now: float) -> bool:
        if not page.is_mapped or page.users or now < page.not_before_s:
            return False
        return self._steps.is_over(page.released_at)
