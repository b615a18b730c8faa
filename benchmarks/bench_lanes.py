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
from functools import partial
from pathlib import Path

import torch

from benchmarks.crossings.asked_lane import AskedLane
from benchmarks.crossings.ffn_client import STEP
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, warm_up, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer

NUM_LAYERS, PASSES, SEED = 12, 40, 7
HOWS = ("resident", "fused", "words", "flags")
"""The FFN server; step graphs of one kernel a layer; of three, sums as words; of three, sums behind a flag."""


def run(lanes: Sequence[AskedLane], server: FFNServer | None, pause_us: int) -> float:
    """Microseconds a layer of one lane, the mean of all."""
    warm_up(partial(turn, lanes, server, pause_us), at_once=1)
    return turn(lanes, server, pause_us)


def turn(lanes: Sequence[AskedLane], server: FFNServer | None, pause_us: int) -> float:
    """The same of one turn of `PASSES`, whatever the clocks are."""
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
        lanes = [AskedLane(gpus, layers, batch, how, seed) for seed in (1, 2)]
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
