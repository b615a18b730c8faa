"""MappedFrames: between a KV worker, whose steps name frames of the pool, and the backing, which has their spots."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from crosspool.kv_pool.ahead import Hint, MemoryHint
from crosspool.kv_pool.backing.base import BackingCounts, FrameRange
from crosspool.kv_pool.backing.driver import VmmDriver
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.scheduler.step import StepDescriptor

StepKey = tuple[int, int]


class MappedFrames:
    """The KV frames of one rank, mapped into a range of addresses for each model."""

    def __init__(self, driver: VmmDriver, num_frames: int, frame_bytes: int, granularity: int) -> None:
        """granularity: what the driver's sizes are multiples of. Raises ValueError for frames that are not, and
        DriverError where the memory cannot be created."""
        if frame_bytes % granularity:
            raise ValueError(
                f"frame_bytes is {frame_bytes}; with kv_backing vmm it must be a multiple of {granularity}"
            )
        self._backing = VmmBacking(driver, num_frames, frame_bytes)
        self._num_frames, self._frame_bytes = num_frames, frame_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that have memory."""
        return (self._num_frames - self._backing.counts().absent_frames) * self._frame_bytes

    def add_model(self, model: str, frames_per_page: int) -> FrameRange:
        """The model's view of the pool. Most of it is not mapped at any time."""
        return self._backing.add_model(model, frames_per_page)

    def remove_model(self, model: str) -> None:
        """Nothing may hold a view of its range when its pages go."""
        self._backing.remove_model(model)

    def begin(self, step: StepDescriptor) -> StepKey:
        key = (step.header.lane, step.header.step_seq)
        self._backing.begin_step(key, [row.sequence_id for row in step.rows])
        return key

    def end(self, key: StepKey) -> None:
        """Nothing touches pages for this step any more, on a device either."""
        self._backing.end_step(key)

    def placed(self, step: StepDescriptor) -> StepDescriptor:
        """The step with spots in its model's range for the pages that its rows bring. Raises DriverError."""
        if not any(row.new_pages for row in step.rows):
            return step
        model, is_decode = step.header.model, step.header.phase == "decode"
        rows = tuple(
            row._replace(new_pages=self._backing.spots(model, row.sequence_id, row.new_pages, is_decode=is_decode))
            if row.new_pages
            else row
            for row in step.rows
        )
        return replace(step, rows=rows)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._backing.forget(sequence_ids)

    def hint(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            if isinstance(hint, MemoryHint):
                self._backing.restore(hint.restored)
                self._backing.withdraw(hint.withdrawn)
            else:
                self._backing.give_back(hint.model, hint.given_back)
                self._backing.expect(hint.model, hint.expected)

    def counts(self) -> BackingCounts:
        return self._backing.counts()

    def close(self) -> None:
        """Free everything. No step may be in flight."""
        self._backing.close()
