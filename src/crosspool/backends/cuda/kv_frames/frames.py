"""The KV frames of one rank as its kernels reach them: one arena, or memory that is mapped for each model."""

from collections.abc import Sequence
from typing import Protocol

import torch

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.device_memory import naming_consumers
from crosspool.backends.cuda.kv_frames.shared_arena import SharedArena
from crosspool.backends.cuda.kv_frames.vmm import GRANULARITY, CudaVmmDriver, range_memory
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.backing.mapped_frames import MappedFrames, StepKey
from crosspool.pools_config import KVBacking
from crosspool.scheduler.step import StepDescriptor, epoch
from crosspool.units import GiB


class KVFrames(Protocol):
    """What a KV worker needs of its frames. Called by the thread that runs steps, `add_model` by one that loads."""

    frame_bytes: int
    is_torch_memory: bool  # whether torch's allocator counts these bytes

    @property
    def num_bytes(self) -> int: ...

    def add_model(self, model: str, frames_per_page: int) -> torch.Tensor:
        """(frames, frame_bytes) uint8: where the frame numbers of the model's placed pages lie."""
        ...

    def remove_model(self, model: str) -> None:
        """No kernel uses the model's memory any more."""
        ...

    def begin(self, step: StepDescriptor) -> StepDescriptor:
        """The step with spots in its model's memory for the pages that it brings. Raises DriverError."""
        ...

    def end(self, step: StepDescriptor, lane: LaneMemory) -> None:
        """The step is over for the host; for the device once the lane is drained."""
        ...

    def forget(self, sequence_ids: Sequence[int]) -> None: ...


class ArenaFrames:
    """Implements `KVFrames`: every model reaches every frame where it lies."""

    def __init__(self, arena: torch.Tensor, shared: SharedArena | None = None) -> None:
        """arena: (num_frames, frame_bytes) uint8; of `shared`, where other processes of this GPU use it too."""
        self.arena, self._shared = arena, shared
        self.frame_bytes = arena.shape[1]
        self.is_torch_memory = shared is None

    @property
    def num_bytes(self) -> int:
        return int(self.arena.nbytes)

    def add_model(self, model: str, frames_per_page: int) -> torch.Tensor:
        return self.arena

    def remove_model(self, model: str) -> None: ...

    def begin(self, step: StepDescriptor) -> StepDescriptor:
        return step

    def end(self, step: StepDescriptor, lane: LaneMemory) -> None: ...

    def forget(self, sequence_ids: Sequence[int]) -> None: ...


class DeviceFrames:
    """Implements `KVFrames`, and `cluster.worker.MapsPages`, over mapped memory.

    A step that was given up may still run on the device, so its pages stay where they are until its lane is drained.
    """

    is_torch_memory = False

    def __init__(self, mapped: MappedFrames, frame_bytes: int, device: torch.device) -> None:
        self._mapped = mapped
        self._device = device
        self.frame_bytes = frame_bytes
        self._draining: list[tuple[StepKey, LaneMemory]] = []  # steps that are over for the host

    @property
    def num_bytes(self) -> int:
        return self._mapped.num_bytes

    def add_model(self, model: str, frames_per_page: int) -> torch.Tensor:
        memory = range_memory(self._mapped.add_model(model, frames_per_page), self._device)
        memory[0].zero_()  # what masked rows touch
        return memory

    def remove_model(self, model: str) -> None:
        self._mapped.remove_model(model)

    def begin(self, step: StepDescriptor) -> StepDescriptor:
        self._settle()
        key = self._mapped.begin(step)
        try:
            return self._mapped.placed(step)
        except BaseException:
            self._mapped.end(key)
            raise

    def end(self, step: StepDescriptor, lane: LaneMemory) -> None:
        self._draining.append(((step.header.lane, step.header.step_seq), lane))
        self._settle()

    def _settle(self) -> None:
        """End the steps that the device is done with too."""
        running = []
        for key, lane in self._draining:
            _, step_seq = key
            if lane.is_drained or lane.done_epoch > epoch(step_seq + 1, 0):  # or a later step of the lane is under way
                self._mapped.end(key)
            else:
                running.append((key, lane))
        self._draining = running

    def forget(self, sequence_ids: Sequence[int]) -> None:
        self._mapped.forget(sequence_ids)

    def hint(self, hints: Sequence[Hint]) -> None:
        self._settle()
        self._mapped.hint(hints)

    def counts(self) -> BackingCounts:
        return self._mapped.counts()


def make_frames(
    site: Site, shape: tuple[int, int], backing: KVBacking, shared: SharedArena | None = None
) -> ArenaFrames | DeviceFrames:
    """The rank's frames, (num_frames, frame_bytes). Raises ValueError where its GPU has no room for them, or they
    cannot be mapped."""
    num_frames, frame_bytes = shape
    if shared is not None:
        return ArenaFrames(shared.frames, shared)
    wanted = f"a KV cache of {num_frames * frame_bytes / GiB:.1f} GiB"
    with naming_consumers(site.rank, site.device, wanted, dict):
        if backing == "vmm":
            mapped = MappedFrames(CudaVmmDriver(site.index), num_frames, frame_bytes, GRANULARITY)
            return DeviceFrames(mapped, frame_bytes, site.device)
        return ArenaFrames(torch.zeros(shape, dtype=torch.uint8, device=site.device))
