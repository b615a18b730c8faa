"""Which lanes of a weights rank have fused passes under way, and which a prompt's kernels.

A fused layer takes the whole GPU: lanes then take turns, layer by layer, but it would wait for a prompt's kernels.
"""

from dataclasses import dataclass, field


@dataclass
class FusedTurns:
    """may_fuse: whether this rank can, and no other rank has its GPU. The rest are numbers of lanes."""

    may_fuse: bool
    fused_lanes: set[int] = field(default_factory=set)
    chunk_lanes: set[int] = field(default_factory=set)

    def take(self, lane: int) -> bool:
        """Whether the lane's step is fused from now on until its `end`: while no prompt's kernels are under way."""
        is_fused = self.may_fuse and not self.chunk_lanes
        if is_fused:
            self.fused_lanes.add(lane)
        return is_fused

    def end(self, lane: int) -> None:
        self.fused_lanes.discard(lane)


@dataclass(frozen=True)
class NoneFused:
    """Arrived once no lane has fused passes under way: what a prompt's kernels wait for.

    Not that all lanes are idle at once: while two of them decode, that may never be seen.
    """

    turns: FusedTurns

    def arrived(self, epoch: int) -> bool:
        return not self.turns.fused_lanes
