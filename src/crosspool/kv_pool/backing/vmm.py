"""VmmBacking: frames as physical memory of their own, mapped into a contiguous range of addresses for each model.

Physical memory is created at start; frames that are withdrawn give theirs back. A page's frames lie side by side in its
model's range, which is what kernels that know no frames need. `mapper.py` decides what is done next and
`driver_memory.py` does it, but for `add_model` in a thread of this object, so that steps wait only for a page that
nobody expected.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from crosspool.kv_pool.backing.base import BackingCounts, FrameRange
from crosspool.kv_pool.backing.driver import DriverError, VmmDriver
from crosspool.kv_pool.backing.driver_memory import DriverMemory
from crosspool.kv_pool.backing.mapped_page import MappedPage
from crosspool.kv_pool.backing.mapper import Mapper
from crosspool.kv_pool.backing.operations import CreateFrame, FreeRange, MapPage, Operation, ReleaseFrame, UnmapPage
from crosspool.kv_pool.pool import Page

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 10.0
"""How long a step waits for a page's spot before it fails."""


class VmmBacking:
    """Spots for the pages of one KV rank's models, over a driver. The engine owns frames; here they get addresses.

    Calls come from the thread that runs steps; none of them but `spots` may wait. Without a thread, the caller's own
    does what is needed (tests).
    """

    def __init__(
        self,
        driver: VmmDriver,
        num_frames: int,
        frame_bytes: int,
        *,
        has_thread: bool = True,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = PLACE_TIMEOUT_S,
    ) -> None:
        """Raises DriverError if the memory cannot be created."""
        self._num_frames = num_frames
        self._frame_bytes = frame_bytes
        self._clock = clock
        self._timeout_s = timeout_s
        self._memory = DriverMemory(driver, num_frames, frame_bytes)
        self._mapper = Mapper()
        self._changed = threading.Condition()
        self._decode_waits = self._full_waits = self._prefill_waits = 0
        self._longest_wait_s = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if has_thread:
            self._thread = threading.Thread(target=self._run, name="crosspool-mapper", daemon=True)
            self._thread.start()

    def add_model(self, model: str, frames_per_page: int) -> FrameRange:
        """Addresses for a model. Frame 0 of the range is the pool's frame 0, which masked rows may touch."""
        num_spots = (self._num_frames - 1) // frames_per_page
        num_frames = 1 + num_spots * frames_per_page
        base = self._memory.reserve_range(num_frames)
        with self._changed:
            self._mapper.add_model(model, base, frames_per_page, num_spots)
        return FrameRange(base=base, num_frames=num_frames, frame_bytes=self._frame_bytes)

    def remove_model(self, model: str) -> None:
        """No step in flight uses the model any more."""
        with self._changed:
            self._mapper.remove_model(model)
            self._changed.notify_all()
        if self._thread is None:
            self.drain()

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None:
        """What these sequences have stays where it is until the step has ended, even if they are forgotten."""
        with self._changed:
            self._mapper.begin_step(step, sequence_ids)

    def end_step(self, step: Hashable) -> None:
        with self._changed:
            self._mapper.end_step(step)
            if self._mapper.has_backlog:
                self._changed.notify_all()

    def spots(self, model: str, sequence_id: int, pages: Sequence[Page], *, is_decode: bool) -> tuple[Page, ...]:
        """Where in the model's range the pages lie, as lists of its frames; the sequence uses them from now on.

        Waits where a page has no spot yet. Raises DriverError if the driver cannot give it one.
        """
        with self._changed:
            found = self._mapper.use(model, sequence_id, pages)
            if not all(page.is_mapped for page in found):
                self._wait(model, found, is_decode)
            return tuple(page.frames for page in found)

    def _wait(self, model: str, found: list[MappedPage], is_decode: bool) -> None:
        """Until every page is mapped; the lock is held before and after."""
        missing = [page for page in found if not page.is_mapped]
        self._count_wait(missing, is_decode)
        started_s = self._clock()
        self._changed.notify_all()
        while not all(page.is_mapped for page in missing):
            for page in missing:
                if page.error is not None:
                    raise DriverError(f"no spot for a page of {model}: {page.error}")
            if self._clock() - started_s > self._timeout_s:
                raise DriverError(f"no spot for a page of {model} within {self._timeout_s:g} s")
            if self._thread is None:
                self._work_once()
            else:
                self._changed.wait(timeout=self._timeout_s / 10)
        self._longest_wait_s = max(self._longest_wait_s, self._clock() - started_s)

    def _count_wait(self, missing: list[MappedPage], is_decode: bool) -> None:
        if not is_decode:
            self._prefill_waits += 1
        elif any(self._mapper.is_blocked(page) for page in missing):
            self._full_waits += 1
        else:
            self._decode_waits += 1

    def forget(self, sequence_ids: Iterable[int]) -> None:
        with self._changed:
            self._mapper.forget(sequence_ids)
            if self._mapper.has_backlog:
                self._changed.notify_all()

    def expect(self, model: str, pages: Iterable[Page]) -> None:
        """The model will get these pages soon."""
        with self._changed:
            self._mapper.expect(model, pages)
            self._changed.notify_all()

    def give_back(self, model: str, pages: Iterable[Page]) -> None:
        """Nobody uses these pages, and the model will not get them again soon."""
        with self._changed:
            self._mapper.give_back(model, pages)
            self._changed.notify_all()

    def withdraw(self, frames: Iterable[int]) -> None:
        """Nobody has these frames until they are restored: their memory goes back to the driver, if it can."""
        with self._changed:
            self._mapper.withdraw(frames)
            self._changed.notify_all()

    def restore(self, frames: Iterable[int]) -> None:
        """Models may get these frames again; they are absent until the driver has given memory for them."""
        with self._changed:
            self._mapper.restore(frames)
            self._changed.notify_all()

    def counts(self) -> BackingCounts:
        with self._changed:
            return BackingCounts(
                maps=self._mapper.num_maps,
                unmaps=self._mapper.num_unmaps,
                failures=self._mapper.num_failures,
                mapped_frames=self._mapper.num_mapped_frames,
                absent_frames=self._mapper.num_absent_frames,
                decode_waits=self._decode_waits,
                full_waits=self._full_waits,
                prefill_waits=self._prefill_waits,
                longest_wait_s=self._longest_wait_s,
            )

    def close(self) -> None:
        """Free everything. No step may be in flight."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._memory.close((self._address(page), len(page.page)) for page in self._mapper.mapped())

    def drain(self) -> None:
        """Do everything that can be done now. For a backing without a thread."""
        with self._changed:
            while self._work_once():
                pass

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                if not self._work_once():
                    retry_s = self._mapper.retry_s()
                    self._changed.wait(None if retry_s is None else max(0.001, retry_s - self._clock()))

    def _work_once(self) -> bool:
        """One operation, the lock let go while the driver works; False if there is none to do now."""
        operation = self._mapper.next_operation(self._clock())
        if operation is None:
            return False
        self._changed.release()
        try:
            error = self._execute(operation)
        finally:
            self._changed.acquire()
        self._mapper.ended(operation, error, self._clock())
        self._changed.notify_all()
        return True

    def _execute(self, operation: Operation) -> str | None:
        """The driver calls of one operation; how they failed."""
        try:
            match operation:
                case MapPage(page):
                    self._memory.map_frames(self._address(page), page.page)
                case UnmapPage(page):
                    self._memory.unmap_frames(self._address(page), len(page.page))
                case FreeRange(model_range):
                    self._memory.free_range(model_range.base)
                case CreateFrame(frame):
                    self._memory.create_frame(frame)
                case ReleaseFrame(frame):
                    self._memory.release_frame(frame)
        except DriverError as error:
            logger.warning("%s: %s", _described(operation), error)
            return str(error)
        return None

    def _address(self, page: MappedPage) -> int:
        return page.model_range.base + page.model_range.first_frame(page.spot) * self._frame_bytes


def _described(operation: Operation) -> str:
    match operation:
        case CreateFrame(frame) | ReleaseFrame(frame):
            return f"{type(operation).__name__} {frame}"
        case FreeRange(model_range):
            return f"FreeRange of {model_range.model}"
        case MapPage(page) | UnmapPage(page):
            return f"{type(operation).__name__} of {page.model_range.model}"
