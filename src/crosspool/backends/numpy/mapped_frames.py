"""MappedFrames: the KV frames of a NumPy rank as host memory that is mapped into a range for each model."""

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from crosspool.backends.numpy.host_vmm import HostVmmDriver
from crosspool.backends.numpy.kv_cache import Arena
from crosspool.kv_pool.ahead import MappingHint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.scheduler.step import StepDescriptor

StepKey = tuple[int, int]


class MappedFrames:
    """Between a worker, whose steps name frames of the pool, and the backing, which knows where they lie."""

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        if frame_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"frame_bytes is {frame_bytes}; with kv_backing vmm it must be a multiple of {mmap.PAGESIZE}"
            )
        self._backing = VmmBacking(HostVmmDriver(), num_frames, frame_bytes)
        self.num_bytes = num_frames * frame_bytes

    def arena_of(self, model: str, frames_per_page: int) -> Arena:
        """(frames of the model's range, frame_bytes): its view of the pool. Most of it is not mapped at any time."""
        found = self._backing.add_model(model, frames_per_page)
        memory = (ctypes.c_uint8 * found.num_bytes).from_address(found.base)
        return np.ctypeslib.as_array(memory).reshape(found.num_frames, found.frame_bytes)

    def remove_model(self, model: str) -> None:
        """Nothing may hold a view of its range when its pages go."""
        self._backing.remove_model(model)

    def begin(self, step: StepDescriptor) -> StepKey:
        key = (step.header.lane, step.header.step_seq)
        self._backing.begin_step(key, [row.sequence_id for row in step.rows])
        return key

    def end(self, key: StepKey) -> None:
        self._backing.end_step(key)

    def placed(self, step: StepDescriptor) -> StepDescriptor:
        """The step with places in its model's range for the pages that its rows bring. Raises DriverError."""
        if not any(row.new_pages for row in step.rows):
            return step
        model, is_decode = step.header.model, step.header.phase == "decode"
        rows = tuple(
            replace(row, new_pages=self._backing.place(model, row.sequence_id, row.new_pages, is_decode=is_decode))
            if row.new_pages
            else row
            for row in step.rows
        )
        return replace(step, rows=rows)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._backing.forget(sequence_ids)

    def hint(self, hints: Sequence[MappingHint]) -> None:
        for hint in hints:
            self._backing.give_back(hint.model, hint.given_back)
            self._backing.expect(hint.model, hint.expected)

    def counts(self) -> BackingCounts:
        return self._backing.counts()
