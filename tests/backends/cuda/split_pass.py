"""A model split over one attention side and several FFN sides in one process, its passes enqueued in one thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.transport import AttentionCrossing, FFNCrossing
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.kv_rank.attention_pass import AttentionPass
from crosspool.backends.cuda.kv_rank.kv_router import KVRouter
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPass
from crosspool.cluster.channel import channel_bytes


class OwnedChannel:
    """A channel in memory that this process can reach by one address."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.zeros(channel_bytes(capacity) + 128, dtype=torch.uint8, device=device)
        self.memory[128:].fill_(0xFF)  # NaN
        start = -self.memory.data_ptr() % 128
        self.memory[start : start + 128].zero_()
        self.map = ChannelMap(self.memory.data_ptr() + start, capacity)


class SplitPass:
    """Passes of a fixed number of rows, always with logits."""

    def __init__(
        self,
        kernels,
        half: AttentionHalf,
        slices: Sequence[FFNHalf],
        *,
        rule: WaitRule | None = None,
        sums_by: str = "words",
        routers=None,
    ) -> None:
        """routers: of every layer, on the attention side (`route: kv`)."""
        device, rule = half.residual.device, rule or WaitRule()
        rows, hidden = half.residual.shape
        self.half, self.rows = half, rows
        self.a2f = [OwnedChannel((2 * rows + 32) * hidden, device) for _ in slices]
        self.f2a = [OwnedChannel((2 * rows + 32) * hidden, device) for _ in slices]
        self.lane = LaneMemory(device, rule)
        links = [LinkMap(into.map, out.map) for into, out in zip(self.f2a, self.a2f, strict=True)]
        router = None if routers is None else KVRouter.allocate(kernels, self.lane, half.spec, routers, rows)
        self.attention = AttentionPass(
            kernels,
            self.lane,
            half,
            AttentionCrossing(kernels, self.lane, links, takes_words=sums_by == "words", router=router),
            samples=True,
        )
        self.ffn_lanes = [LaneMemory(device, rule) for _ in slices]
        self.ffn = [
            FFNPass(
                kernels,
                lane,
                part,
                FFNCrossing(kernels, lane, LinkMap(link.outbox, link.inbox)),
                rows,
                hidden,
                sums_by=sums_by,
                takes_choices=routers is not None,
            )
            for lane, part, link in zip(self.ffn_lanes, slices, links, strict=True)
        ]

    def push(self, base: int, token_ids: Sequence[int], positions: Sequence[int]) -> int:
        layers = self.half.spec.num_layers
        for lane in self.ffn_lanes:
            lane.push(base, layers)
        return self.lane.push(base, layers, self.rows, token_ids, positions)

    def run(self) -> None:
        """Enqueue a pass layer by layer, so that no wait comes before what it waits for."""
        halves = [part.kernels() for part in self.ffn]
        for half in halves:
            next(half)
        for _layer in self.attention.kernels():
            for half in halves:
                next(half, None)
