"""Do two lanes share a weights GPU well? Each lane's attention is a pause: nothing but the FFN side is measured.

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_lanes [--out DIRECTORY] [--batches 1,4] [--pause 22]

One GPU: a kernel a lane stands where attention would be, beside the FFN's multiprocessors. `one`, `two`: microseconds a
layer with one lane and with two. pipeline_efficiency: the gain of two lanes over what the pause and a busy weights GPU
allow, which is one lane's time over the longer of pause and FFN (half of two lanes' time without pauses, served).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.crossings.ffn_client import STEP, ClientParams
from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, keep_busy, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.model import Side, open_links
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.channels.transport_params import Flags
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.ffn_pass import FFNPass, SumsBy
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, serve_layers

NUM_LAYERS, PASSES, SEED = 12, 40, 7
HOWS = ("resident", "fused", "words", "flags")
"""The FFN server; step graphs of one kernel a layer; of three, sums as words; of three, sums behind a flag."""


class Lane:
    """One lane of a model's layers, and the kernel that asks in it."""

    def __init__(self, gpus: OneGpu, layers: Sequence[FFNLayerWeights], batch: int, how: str, seed: int) -> None:
        self.layers, self.batch, self._how, self.base = layers, batch, how, 0
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
        self._times = torch.zeros(passes + 1, dtype=torch.int64, device=self._rows.device)
        params = ClientParams(
            view=self.kv.lane.view(),
            flags=Flags.at([link.outbox.flag]),
            answers=Flags.at([link.inbox.flag]),
            rows=self._rows.data_ptr(),
            times=self._times.data_ptr(),
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

    def us_a_layer(self) -> float:
        """Median over the passes once all lanes are at work. RuntimeError where a wait was too long."""
        self.kv.stream.synchronize()
        if self.kv.lane.late_epoch(0) or self.side.lane.late_epoch(0):
            raise RuntimeError("a wait missed its deadline")
        stamps = self._times.tolist()[PASSES // 4 :]
        return float(median((end - begin) / 1e3 / len(self.layers) for begin, end in pairwise(stamps)))


def run(lanes: Sequence[Lane], server: FFNServer | None, pause_us: int) -> float:
    """Microseconds a layer of one lane, the mean of all."""
    keep_busy(0.25)
    all_params = [lane.params(PASSES, pause_us) for lane in lanes]
    torch.cuda.synchronize()
    for _ in range(2):
        for lane in lanes:
            lane.post(server)
    for lane, params in zip(lanes, all_params, strict=True):
        lane.ask(params)
    for _ in range(2, PASSES):
        for lane in lanes:
            while lane.base - lane.side.lane.done_epoch > STEP * 20:
                time.sleep(0)
            lane.post(server)
    times = [lane.us_a_layer() for lane in lanes]
    if server is not None:
        server.stop()
    return sum(times) / len(times)


def measure(gpus: OneGpu, report: Report, name: str, batch: int, pause_us: int) -> None:
    layers = random_ffn_weights(full_spec(name, NUM_LAYERS), SEED, gpus.devices[0])
    ffn_us = 0.0
    for how in HOWS:
        lanes = [Lane(gpus, layers, batch, how, seed) for seed in (1, 2)]
        server = None
        if how == "resident":
            server = FFNServer(lanes[0].side.kernels, gpus.devices[0], [lane.side.lane for lane in lanes])
            server.reserve(max(lane.served.smem_bytes for lane in lanes))
            ffn_us = run(lanes, server, 0) / 2
            report.metric(f"lanes_us.{name}.b{batch}.ffn", ffn_us, note="a busy server's time for a layer")
        one, two = run(lanes[:1], server, pause_us), run(lanes, server, pause_us)
        bound = one / max(pause_us, ffn_us)
        metric = f"{name}.b{batch}.pause{pause_us}.{how}"
        report.metric(f"lanes_us.{metric}.one", one)
        report.metric(f"lanes_us.{metric}.two", two, limit=2 * max(pause_us, ffn_us) if pause_us < ffn_us else pause_us)
        report.metric(f"pipeline_efficiency.{metric}", 2 * one / two / bound, limit=0.95, note="the target")
        print(
            f"{metric}: one {one:.1f}, two {two:.1f}, gain {2 * one / two:.2f} of {bound:.2f}, ffn {ffn_us:.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default="qwen3-30b-a3b")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--pause", type=int, default=22, help="microseconds that attention would take")
    options = parser.parse_args()
    gpus, failures = OneGpu(), dict[str, str]()
    config = {"num_layers": NUM_LAYERS, "passes": PASSES, "pause_us": options.pause}
    report = Report("lanes", hardware="h200", config=config, seed=SEED)
    report.summary = "Two lanes on one weights GPU, attention a pause; random routing."
    for name in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            guarded(f"{name} b{batch}", lambda n=name, b=batch: measure(gpus, report, n, b, options.pause), failures)  # type: ignore[misc]
            torch.cuda.empty_cache()
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
