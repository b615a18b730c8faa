"""One end of rows that bounce between two GPUs: what hops are measured with."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from benchmarks.split_model.model import Side
from crosspool.backends.cuda.channels.channel_map import ChannelMap
from crosspool.backends.cuda.channels.transport import begin_pass, end_pass
from crosspool.backends.cuda.channels.transport_params import CrossParams, DelayParams, Flags, Slots


class Bouncer:
    """One end: `kernels()` is a pass of `turns` hops. The first end starts each turn, the second answers it."""

    def __init__(
        self, side: Side, inbox: ChannelMap, outbox: ChannelMap, num_bytes: int, turns: int, first: bool
    ) -> None:
        self.side, self.inbox, self.outbox = side, inbox, outbox
        self.num_bytes, self.turns, self.first = num_bytes, turns, first
        self.blocks = max(1, num_bytes // 4096)
        self.source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=side.kernels.device)
        self.delays: random.Random | None = None
        self.inbox_rows: list[torch.Tensor] | None = None  # of even and odd turns: then every turn adds one

    def kernels(self) -> Iterator[int]:
        begin_pass(self.side.kernels, self.side.lane)
        for turn in range(self.turns):
            yield turn
            if self.delays is not None:
                nanoseconds = self.delays.choice((0, 0, 300, 2000, 8000))
                self.launch("delay", DelayParams(nanoseconds))
            waits = turn if not self.first else turn - 1
            if self.inbox_rows is None:
                self.cross(waits, turn)
                continue
            if waits >= 0:
                self.cross(waits, None)
                torch.add(self.inbox_rows[waits % 2], 1, out=self.source)
            self.cross(-1, turn)
        if self.first:
            self.cross(self.turns - 1, None)
            if self.inbox_rows is not None:
                self.source.copy_(self.inbox_rows[(self.turns - 1) % 2])
        end_pass(self.side.kernels, self.side.lane, self.turns)

    def cross(self, waits: int, raises: int | None) -> None:
        params = CrossParams(view=self.side.lane.view(), row_bytes=self.num_bytes // self.blocks)
        if waits >= 0:
            params.wait_for, params.wait_layer = Flags.at([self.inbox.flag]), waits
        if raises is not None:
            params.raise_for, params.raise_layer = Flags.at([self.outbox.flag]), raises
            params.rows, params.slots = self.source.data_ptr(), Slots(self.outbox.slot(raises))
        self.launch("cross", params, self.blocks if raises is not None else 1)

    def launch(self, kernel: str, params: CrossParams | DelayParams, blocks: int = 1) -> None:
        threads = 32 if kernel == "delay" else 256
        self.side.kernels.launch(
            "transport", kernel, grid=(blocks, 1, 1), threads=threads, smem_bytes=256, params=params
        )
