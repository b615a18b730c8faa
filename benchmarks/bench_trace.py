"""Does the host do anything between the layers of a decode step, and what does a step cost it?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_trace [--model deepseek-v2-lite] [--out DIRECTORY]

A full-size model with random weights on two GPUs, batch 1: real workers and rank loops of one KV rank and one weights
rank, in one process so that one trace has both. Each step is recorded (torch.profiler, through CUPTI): kernels of both
GPUs, every CUDA call and every segment that a rank's loop runs. `host_events_between_layers` counts calls and segments
that begin after a step's first layer and before the end of its last, at most over the recorded steps; it must be 0.
`host_us_per_step`: processor time of each rank's thread for a step, without a profiler: descriptor, replay, token read.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded
from benchmarks.ranks.driven import DrivenRanks, Sequence_
from benchmarks.ranks.lone_steps import host_us, one_step, warmed_up
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.model import Gpus
from benchmarks.traces.step_picture import step_picture
from benchmarks.traces.step_trace import HOST, SEGMENT, decode_steps, host_events_between_layers, read_spans
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.cluster.rank_steps import RankSteps
from crosspool.pools_config import Control
from crosspool.units import MiB

SEED = 7
MODES: tuple[Control, ...] = ("graphs", "resident")
CONTEXT = 4096
WARM_UP, RECORDED, COUNTED = 12, 6, 100
LEAST_RECORDED = 4
LIMIT_US = 60.0
FRAMES = 600


@contextmanager
def named_segments() -> Iterator[None]:
    """Rank loops tell the profiler of every segment they run."""
    run = RankSteps.run_segment

    def named(steps: RankSteps, *arguments: Any) -> Any:
        with torch.profiler.record_function(f"{SEGMENT} of {steps.name}"):
            return run(steps, *arguments)

    setattr(RankSteps, "run_segment", named)  # noqa: B010 - it is a method
    try:
        yield
    finally:
        setattr(RankSteps, "run_segment", run)  # noqa: B010


def record(ranks: DrivenRanks, sequences: Sequence[Sequence_], path: Path) -> dict[str, Any]:
    """A trace of some steps, as Chrome's format has it, in `path` too."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with named_segments(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(RECORDED):
            one_step(ranks, sequences)
        for gpu in range(2):
            torch.cuda.synchronize(gpu)  # a server leaves once it has nothing to do
    profiler.export_chrome_trace(str(path))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


class Bench:
    """One model on GPU 0 and 1."""

    def __init__(self, name: str, out: Path, report: Report) -> None:
        self.name, self.out, self.report = name, out, report
        self.gpus, self.spec = Gpus(2), full_spec(name)
        devices = self.gpus.devices
        self.attention = random_attention_weights(self.spec, SEED, devices[0])
        self.layers = random_ffn_weights(self.spec, SEED, devices[1])
        self.arena = torch.zeros(FRAMES, 2 * MiB, dtype=torch.uint8, device=devices[0])
        for device in devices:
            torch.cuda.synchronize(device)

    def mode(self, control: Control) -> None:
        """Raises RuntimeError where the host did something between layers; its report has been written by then."""
        kernels, devices = self.gpus.kernels, self.gpus.devices
        ranks = DrivenRanks(
            (kernels[0], kernels[1]),
            (devices[0], devices[1]),
            self.spec,
            self.attention,
            self.layers,
            self.arena,
            control,
            num_lanes=1,
            ahead=(),
        )
        sequences, step_s = warmed_up(ranks, CONTEXT, WARM_UP)
        label = f"{self.name}.{control}"
        for rank, used_us in host_us(ranks, sequences, 2 * step_s, COUNTED).items():
            self.report.samples(
                f"host_us_per_step.{label}.{rank}", used_us[10:], limit=LIMIT_US, note="of a core; asked"
            )
            print(f"host_us_per_step.{label}.{rank}: {sorted(used_us)[len(used_us) // 2]:.1f}", flush=True)
        trace = record(ranks, sequences, self.out / f"trace_{control}.json")
        spans = read_spans(trace)
        steps = decode_steps(spans, "0")
        if len(steps) < LEAST_RECORDED:
            raise RuntimeError(f"{len(steps)} of {RECORDED} steps are in the trace of {control}")
        self.report.metric(f"traced_steps.{label}", len(steps), note="whole in the trace")
        between = [host_events_between_layers(spans, step) for step in steps]
        most = max(between, key=len)
        shown = steps[-2]
        calls = [span for span in spans if span.is_call and shown.begin_us - 1e3 < span.begin_us < shown.end_us]
        gpu = sum(1 for span in spans if span.track != HOST and shown.begin_us <= span.begin_us <= shown.end_us)
        self.report.metric(f"host_events_between_layers.{label}", len(most), limit=0, note="CUDA calls and segments")
        self.report.metric(f"traced_step_ms.{label}", (shown.end_us - shown.begin_us) / 1e3, note="under the profiler")
        self.report.metric(f"kernels_of_a_step.{label}", gpu, note="that begin in it, of both GPUs")
        tracks = [(HOST, "host, both ranks"), ("0", "KV GPU"), ("1", "weights GPU")]
        title = f"{self.name}, batch 1, {CONTEXT} tokens, control {control}"
        picture = self.out / f"{self.report.stem}_{control}.svg"
        picture.write_text(step_picture(title, spans, shown, tracks), encoding="utf-8")
        print(f"host_events_between_layers.{label}: {len(most)} {sorted({span.name for span in most})}", flush=True)
        print(
            f"  a step of {shown.num_layers} layers, {gpu} kernels, {len(calls)} CUDA calls in and before it",
            flush=True,
        )
        self.report.write(self.out)
        if most:
            raise RuntimeError(f"control {control}: the host began {len(most)} things between the layers of a step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(CONFIGS), default="deepseek-v2-lite")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = {"model": options.model, "context": CONTEXT, "steps": RECORDED, "batch": 1}
    report = Report("trace", hardware="h200-x2", config=config, seed=SEED)
    report.summary = "What the host does between the layers of decode steps, and what a step costs each rank's thread."
    bench, failures = Bench(options.model, options.out, report), dict[str, str]()
    gc.disable()  # what frees device memory waits for the device, which may wait for this thread
    for control in MODES:
        guarded(control, partial(bench.mode, control), failures)
        gc.collect()
    print(report.as_markdown(), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
