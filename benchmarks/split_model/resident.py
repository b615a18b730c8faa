"""A split model whose FFN side is the resident server: no launch on the weights GPUs between two layers or steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.split_model.model import SplitModel
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers

PATIENCE_S = 5.0


class ResidentModel(SplitModel):
    """As SplitModel. servers: one a weights rank, of another model whose lanes they serve as well; else new ones."""

    def __init__(
        self, *args: Any, idle_s: float = 0.2, servers: Sequence[FFNServer] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.servers, self._served = list(servers or ()), []
        takes_choices = options.get("route") == "kv"
        for side, half, link in zip(self.weights, self.ffn_halves, self.links, strict=True):
            device = side.kernels.device
            with torch.cuda.device(device):
                crossing = FFNCrossing(side.kernels, side.lane, LinkMap(link.outbox, link.inbox))
                scratch = FFNScratch.for_layers(list(half.layers), self.batch, device)
                served = serve_layers(half.layers, crossing, self.batch, scratch, takes_choices=takes_choices)
                self._served.append(served)
                if servers is None:
                    self.servers.append(FFNServer(side.kernels, device, [side.lane], idle_s=idle_s))
                self.servers[len(self._served) - 1].reserve(served.smem_bytes)
                torch.cuda.synchronize(device)

    def enqueue_ffn(self, base: int) -> None:
        for side, server, served in zip(self.weights, self.servers, self._served, strict=True):
            server.post(side.lane, served, base)

    def synchronize(self) -> None:
        self.kv.stream.synchronize()
        begin = time.perf_counter()
        while not all(side.lane.is_drained for side in self.weights):
            if time.perf_counter() - begin > PATIENCE_S:
                raise RuntimeError("the FFN server did not end its pass")

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
