"""One lane of a weights GPU, and the kernel that asks in it where attention would be (`csrc/ffn_client.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch

from benchmarks.crossings.ffn_client import STEP, ClientParams
from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.split_model.model import Side, open_links
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.channels.transport_params import Flags
from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPass, SumsBy
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers


class AskedLane:
    """A model's layers in one lane. `how` as in `bench_lanes`: what serves it."""

    def __init__(self, gpus: OneGpu, layers: Sequence[FFNLayerWeights], batch: int, how: str, seed: int) -> None:
        self.layers, self.batch, self.base = layers, batch, 0
        device, hidden = gpus.devices[0], layers[0].hidden
        rule = WaitRule(deadline_s=2.0)
        self.kv = Side.on(gpus.kernels[0], rule)
        self.side = Side.on(MostOfAGpu(gpus.kernels[0], gpus.kernels[0].num_sms - 2), rule)  # type: ignore[arg-type]
        (self._link,), self._kept = open_links(device, [device], (2 * batch + 32) * hidden)
        generator = torch.Generator(device=device).manual_seed(seed)
        self._rows = torch.randn(len(layers), batch, hidden, device=device, generator=generator).bfloat16()
        crossing = FFNCrossing(self.side.kernels, self.side.lane, LinkMap(self._link.outbox, self._link.inbox))
        self._are_words = how != "flags" and self._link.inbox.fits_words(batch, hidden)
        if how == "resident":
            self.served = serve_layers(layers, crossing, batch, FFNScratch.for_layers(list(layers), batch, device))
        else:
            half = FFNHalf(self.side.kernels, layers, batch, fused=how == "fused")
            sums_by: SumsBy = "flags" if how == "flags" else "words"
            source = FFNPass(self.side.kernels, self.side.lane, half, crossing, batch, hidden, sums_by=sums_by)
            self._graph = self.side.capture(source)
        torch.cuda.synchronize()

    def post(self, server: FFNServer | None) -> None:
        """One more pass of the FFN side."""
        self.base += STEP
        if server is not None:
            server.post(self.side.lane, self.served, self.base)
            return
        self.side.lane.push(self.base, len(self.layers))
        self.side.replay(self._graph)

    def params(self, passes: int, pause_us: int) -> ClientParams:
        link, hidden = self._link, self.layers[0].hidden
        self.stamps = pinned((passes + 1,), torch.int64, self._rows.device)  # read while passes go on
        params = ClientParams(
            view=self.kv.lane.view(),
            flags=Flags.at([link.outbox.flag]),
            answers=Flags.at([link.inbox.flag]),
            rows=self._rows.data_ptr(),
            times=self.stamps.data_ptr(),
            first_base=self.base + STEP,
            passes=passes,
            layers=len(self.layers),
            row_bytes=self._rows[0].nbytes,
            values=self.batch * hidden,
            pause_ns=pause_us * 1000,
            are_words=self._are_words,
        )
        for parity in range(2):
            params.slots[parity][0] = link.outbox.slot(parity)
            words = link.inbox.words(parity, self.batch, hidden) if self._are_words else None
            params.sums[parity][0] = link.inbox.slot(parity) if words is None else words.address
        return params

    def ask(self, params: ClientParams) -> None:
        with torch.cuda.stream(self.kv.stream):
            self.kv.kernels.launch("ffn_client", "ffn_client", grid=(1, 1, 1), threads=512, smem_bytes=0, params=params)

    def check(self) -> None:
        """Raises RuntimeError where a wait was too long."""
        if self.kv.lane.late_epoch(0) or self.side.lane.late_epoch(0):
            raise RuntimeError("a wait missed its deadline")

    def us_a_layer(self) -> float:
        """Median over the passes once all lanes are at work, after the last one has ended."""
        self.kv.stream.synchronize()
        self.check()
        stamps = self.stamps.tolist()
        stamps = stamps[(len(stamps) - 1) // 4 :]
        return float(median((end - begin) / 1e3 / len(self.layers) for begin, end in pairwise(stamps)))
