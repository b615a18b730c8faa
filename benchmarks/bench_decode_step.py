"""How long does a decode step take on 1 KV GPU and N weights GPUs, how well do two lanes overlap, where is the rest?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_decode_step [--out DIRECTORY] [--models a,b]
        [--layouts 1+1,1+1s25] [--batches 1,2] [--contexts 4096] [--ways graphs,resident] [--lanes 1,2,4]

Full-size models with seeded random weights (near-uniform routing) and a seeded cache. A layout `1+1s25` puts 25 % of
every FFN on the KV GPU beside attention, where layers are never fused. Steps are enqueued ahead and feed each other
their tokens on the device. `attention` and `ffn` are each side's busy time: the same kernels without waits. Logits of
split models are compared with those of one GPU that runs the same slices. Batches whose KV would not fit are left out.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.lanes import LanesBench
from benchmarks.split_model.model import Gpus
from benchmarks.split_model.parts import draw
from benchmarks.split_model.steps import Steps
from benchmarks.split_model.ways import Drawn
from crosspool.backends.cuda.loading.weights import random_attention_weights
from crosspool.models.spec import ModelSpec
from crosspool.units import GiB

TARGETS = {"qwen3-30b-a3b": 3.2, "glm-4.7-flash": 3.7, "deepseek-v2-lite": 2.3}
SEED = 7
SHORT = 4096
"""Tokens of context up to which every way is measured."""

MOST_CACHE_BYTES = 110 * GiB


def cases(spec: ModelSpec, layout: str, options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(batch, context) of one layout: all that fit, or some short ones of a layout that is not the first."""
    if layout != options.layouts.split(",")[0]:
        yield from ((batch, SHORT) for batch in options.other_batches)
        return
    for context in options.contexts:
        for batch in (context > SHORT and options.long_batches) or options.batches:
            if batch * context * spec.kv_bytes_per_token("bfloat16") <= MOST_CACHE_BYTES:
                yield batch, context


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--layouts", default="1+1", help="of the second and later ones, only --other-batches at 4K")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=numbers, default=[4096, 32768, 131072])
    parser.add_argument("--other-batches", type=numbers, default=[1, 8])
    parser.add_argument("--ways", type=names, default=["graphs", "fused", "resident"], help="up to 4K")
    parser.add_argument("--long-ways", type=names, default=["fused", "resident"], help="of longer contexts")
    parser.add_argument("--long-batches", type=numbers, default=None, help="there; default: all")
    parser.add_argument("--parts", type=numbers, default=[1, 2, 4, 8, 16, 32], help="batches whose parts are measured")
    parser.add_argument("--long-parts", type=numbers, default=[1, 8], help="the same of longer contexts")
    parser.add_argument("--extra", type=names, default=[], help="ways measured besides at batch 1 and 4K")
    parser.add_argument("--lanes", type=numbers, default=[], help="batches of two equal lanes, such as 1,2,4")
    parser.add_argument("--lane-contexts", type=numbers, default=[4096, 32768])
    parser.add_argument("--lane-ways", type=names, default=["graphs", "fused", "resident"])
    parser.add_argument("--lane-seconds", type=float, default=0.3)
    parser.add_argument("--pairs", default="", help="unlike lanes: a.b1.4k+b.b1.4k,...")
    parser.add_argument("--steady-seconds", type=float, default=0.0, help="for which unlike lanes are watched too")
    parser.add_argument("--name", default="decode_step", help="of the result")
    parser.add_argument("--layers", type=int, default=None, help="only the last so many layers")
    parser.add_argument("--skip", default="", help="parts to leave out: equality,host")
    return parser.parse_args()


class Bench:
    """All parts in turn; a part that fails is named at the end, and the others go on."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus, report: Report) -> None:
        self.options, self.gpus, self.report = options, gpus, report
        self.steps = Steps(gpus, report, options.ways, SEED)
        self.lanes = LanesBench(gpus, report, options.lane_ways, options.lane_seconds, SEED, options.steady_seconds)
        self.failures: dict[str, str] = {}
        self.paired: dict[str, Drawn] = {}

    def model(self, name: str) -> None:
        options, num_gpus = self.options, len(self.gpus.devices)
        spec = full_spec(name, options.layers)
        attention = random_attention_weights(spec, SEED, self.gpus.devices[0])
        for layout in options.layouts.split(","):
            drawn = draw(self.gpus, name, spec, attention, SEED, layout, num_gpus)
            for batch, context in cases(spec, layout, options):
                self._measure(drawn, layout, batch, context)
            for batch in () if "equality" in options.skip else (1, 4):
                self._guarded(f"equality {name} {layout} b{batch}", partial(self.steps.equality, drawn, layout, batch))
            for context in options.lane_contexts if layout.startswith("1+1") else ():
                for batch in options.lanes:
                    part = partial(self.lanes.equal, drawn, layout, batch, context)
                    self._guarded(f"two lanes {name} {layout} b{batch}", part)
            if "host" not in options.skip and layout == "1+1":
                self._guarded(f"host {name} {layout}", partial(self.steps.host_us, drawn, layout))
            if layout == "1+1" and name in options.pairs:
                self.paired[name] = drawn
            del drawn
            self.report.write(options.out)  # a run that is cut leaves what it has

    def _measure(self, drawn: Drawn, layout: str, batch: int, context: int) -> None:
        options, ways = self.options, list(self.options.ways)
        is_first = batch == 1 and context == SHORT
        if context > SHORT:
            ways = options.long_ways
        elif is_first:
            ways = [*ways, *options.extra]
        part = partial(
            self.steps.measure,
            ways=ways,
            has_parts=batch in (options.parts if context <= SHORT else options.long_parts),
            target=TARGETS.get(drawn.name) if is_first else None,
        )
        name = f"{drawn.name} {layout} b{batch} {context}"
        self._guarded(name, partial(part, drawn, layout, batch, context))

    def pairs(self) -> None:
        for pair in filter(None, self.options.pairs.split(",")):
            self._guarded(f"lanes {pair}", partial(self.lanes.pair, self.paired, pair))
            self.report.write(self.options.out)

    def _guarded(self, name: str, work: partial[None]) -> None:
        guarded(name, work, self.failures)
        gc.collect()  # a cache that is still held may be most of the GPU
        torch.cuda.empty_cache()


def main() -> None:
    options = read_options()
    num_gpus = torch.cuda.device_count()
    config = {name: vars(options)[name] for name in ("layouts", "batches", "contexts", "lane_seconds")}
    report = Report(options.name, hardware=f"h200-x{num_gpus}", config=config, seed=SEED)
    report.summary = "Random weights at true shapes; `rest` is what the step takes beyond both sides' busy times."
    gc.freeze()  # so that collections are short
    bench = Bench(options, Gpus(num_gpus), report)
    for name in options.models.split(","):
        bench.model(name)
    bench.pairs()
    write_failures(bench.failures, options.out)


if __name__ == "__main__":
    main()
