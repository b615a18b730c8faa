"""Host frames of a KV rank: where pages lie that its pool gave up (`kv_pool/host_tier.py`)."""

from collections.abc import Sequence

from crosspool.backends.numpy.kv_cache import Arena, new_arena
from crosspool.kv_pool.host_tier import FrameCopy


class HostFrames:
    """Implements `cluster.worker.CopiesFrames` beside an arena. `first_frame`: number of the arena's frame 0."""

    def __init__(self, arena: Arena, num_frames: int, first_frame: int) -> None:
        self._arena, self._first_frame = arena, first_frame
        self._host = new_arena(num_frames, arena.shape[1])

    @property
    def num_bytes(self) -> int:
        return self._host.nbytes

    def copy(self, copies: Sequence[FrameCopy]) -> None:
        for each in copies:
            for frame, host_frame in zip(each.frames, each.host_frames, strict=True):
                own = frame - self._first_frame
                if each.is_stowed:
                    self._host[host_frame] = self._arena[own]
                else:
                    self._arena[own] = self._host[host_frame]
