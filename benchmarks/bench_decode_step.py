"""How long does a decode step take on 1 KV GPU and N weights GPUs, how well do two lanes overlap, where is the rest?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_decode_step [--out DIRECTORY] [--models a,b]
        [--layouts 1+1,1+2] [--batches 1,2] [--contexts 4096] [--ways graphs,resident] [--lanes 1,2,4]

Full-size models with seeded random weights (near-uniform routing) and a seeded cache. A layout `1+1s25` puts 25 % of
every FFN on the KV GPU beside attention, where layers are never fused. Steps are enqueued ahead and feed each other
their tokens on the device. `attention` and `ffn` are each side's busy time: the same kernels without waits. Logits of
split models are compared with those of one GPU that runs the same slices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.lanes_at_work import NO_WAITS, busy_times
from benchmarks.lanes_bench import LanesBench
from benchmarks.report import RESULTS, Report
from benchmarks.split_model import Gpus, step_times_ms
from benchmarks.split_parts import COPY_TB_PER_S, compare, draw, step_floor
from benchmarks.ways import WAYS, Drawn, split_model
from crosspool.backends.cuda.weights import random_attention_weights

TARGETS = {"qwen3-30b-a3b": 3.2, "glm-4.7-flash": 3.7, "deepseek-v2-lite": 2.3}
ALWAYS = ("graphs", "fused", "resident")
SEED = 7
NOTE = f"bytes at {COPY_TB_PER_S} TB/s, experts as random routing chooses them, one pool after the other"


class Steps:
    """One lane's steps. ways: those of every case, and what else batch 1 at 4K is measured by."""

    def __init__(self, gpus: Gpus, report: Report, ways: Sequence[str], extra: Sequence[str]) -> None:
        self.gpus, self.report, self.ways, self.extra = gpus, report, ways, extra

    def measure(self, drawn: Drawn, layout: str, batch: int, context: int) -> None:
        """Steps by every way, and each side's busy time."""
        case = f"{drawn.name}.{layout}.b{batch}.{context // 1024}k"
        floor = step_floor(drawn.spec, batch, context, len(drawn.slices))
        ways = [*self.ways, *(self.extra if batch == 1 and context == 4096 else ())]
        if any(gpu == 0 for gpu, _ in drawn.slices):  # attention needs its GPU's multiprocessors
            ways = [way for way in ways if WAYS[way].shares_a_gpu]
        medians = {}
        for way in ways:
            model = split_model(self.gpus, drawn, way, batch=batch, context=context, seed=SEED)
            times = step_times_ms(model, context, steps=24 if batch < 8 else 12, rounds=2)
            medians[way] = sorted(times)[len(times) // 2]
            self.report.samples(f"decode_ms.{case}.{way}", times, limit=floor.step, note=NOTE)
            if way == ways[0]:
                self.report.metric(f"decode_ms.{case}.graph_mib", model.graph.num_bytes / 2**20)
                self.report.metric(f"decode_ms.{case}.capture_ms", model.graph.seconds * 1e3)
            model.stop()
            del model
        self.breakdown(drawn, case, batch, context, medians)
        shown = ", ".join(f"{way} {value:.3f}" for way, value in medians.items())
        print(f"decode_ms.{case}: {shown}; floor {floor.step:.3f}, target {TARGETS[drawn.name]}", flush=True)

    def breakdown(self, drawn: Drawn, case: str, batch: int, context: int, medians: dict[str, float]) -> None:
        """Microseconds a layer of each side, beside its bytes, and what crossings and the rest take."""
        floor, layers = step_floor(drawn.spec, batch, context, len(drawn.slices)), drawn.spec.num_layers
        for way in (way for way in ALWAYS if way in medians):
            model = split_model(self.gpus, drawn, way, batch=batch, context=context, seed=SEED, rule=NO_WAITS)
            busy = busy_times(model)
            model.stop()
            del model
            us = 1e3 / layers
            metric = f"decode_us_a_layer.{case}.{way}"
            self.report.metric(f"{metric}.attention", busy.attention * us, limit=floor.attention * us, note="bytes")
            self.report.metric(f"{metric}.tail", busy.tail * us, note="head and sampling, part of attention")
            self.report.metric(f"{metric}.ffn", busy.ffn * us, limit=floor.ffn * us, note="bytes")
            if busy.beside:
                self.report.metric(f"{metric}.beside", busy.beside * us, note="the FFN's share on attention's GPU")
            rest = medians[way] - busy.attention - max(busy.ffn, busy.beside)
            self.report.metric(f"{metric}.rest", rest * us, limit=2 * 2.75, note="two bare hops")
            print(
                f"  {way}, us a layer: attention {busy.attention * us:.1f} (bytes {floor.attention * us:.1f}; tail "
                f"{busy.tail * us:.1f} of it), ffn {busy.ffn * us:.1f} ({floor.ffn * us:.1f}), beside attention "
                f"{busy.beside * us:.1f}, rest {rest * us:.1f}",
                flush=True,
            )

    def equality(self, drawn: Drawn, layout: str, batch: int) -> None:
        """Split logits against those of one GPU, by every way."""
        for way in self.ways:
            model = split_model(self.gpus, drawn, way, batch=batch, context=512, seed=SEED)
            equal = compare(self.gpus, model, drawn.slices, 512)
            model.stop()
            del model
            self.report.metric(f"equal_steps.{drawn.name}.{layout}.b{batch}.{way}", equal, limit=3, note="bit for bit")
            print(f"equal_steps.{drawn.name}.{layout}.b{batch}.{way}: {equal} of 3", flush=True)

    def host_us(self, drawn: Drawn, layout: str) -> None:
        """What the host does for one step of all ranks: records, replays and the token's read."""
        model = split_model(self.gpus, drawn, "graphs", batch=1, context=1024, seed=SEED)
        times = []
        for step in range(60):
            model.rewind(1024)
            begin = time.perf_counter()
            slot = model.enqueue([step])
            enqueued = time.perf_counter()
            model.synchronize()
            read = time.perf_counter()
            model.kv.lane.tokens(slot, 1)
            times.append((enqueued - begin + time.perf_counter() - read) * 1e6 / (1 + len(drawn.slices)))
        self.report.samples(
            f"host_us_per_step.{drawn.name}.{layout}", times[10:], limit=60, note="a rank's share; the target"
        )
        print(f"host_us_per_step: {sorted(times)[30]:.1f}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--layouts", default="1+1")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 32768])
    parser.add_argument("--ways", default=",".join(ALWAYS), help="of every case")
    parser.add_argument("--extra", default="route_kv,fused_route_kv,resident_route_kv,flags,early,fused_early")
    parser.add_argument("--lanes", type=numbers, default=[1, 2, 4], help="batches of two equal lanes")
    parser.add_argument("--lane-contexts", type=numbers, default=[4096, 32768])
    parser.add_argument("--lane-ways", default=",".join(ALWAYS))
    parser.add_argument("--lane-seconds", type=float, default=0.3)
    parser.add_argument("--pairs", default="", help="unlike lanes: a.b1.4k+b.b1.4k,...")
    parser.add_argument("--layers", type=int, default=None, help="only the last so many layers")
    parser.add_argument("--skip", default="", help="parts to leave out: equality,host")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    gpus, failures = Gpus(num_gpus), dict[str, str]()
    config = {name: vars(options)[name] for name in ("layouts", "batches", "contexts", "lane_seconds")}
    report = Report("decode_step", hardware=f"h200-x{num_gpus}", config=config, seed=SEED)
    report.summary = "Random weights at true shapes; `rest` is what the step takes beyond both sides' busy times."
    steps = Steps(gpus, report, options.ways.split(","), [way for way in options.extra.split(",") if way])
    lanes = LanesBench(gpus, report, options.lane_ways.split(","), options.lane_seconds, SEED)
    all_drawn: dict[str, Drawn] = {}
    for name in options.models.split(","):
        spec = full_spec(name, options.layers)
        attention = random_attention_weights(spec, SEED, gpus.devices[0])
        for layout in options.layouts.split(","):
            drawn = draw(gpus, name, spec, attention, SEED, layout, num_gpus)
            for context in options.contexts:
                for batch in options.batches:
                    guarded(
                        f"{name} {layout} b{batch} {context}",
                        lambda d=drawn, y=layout, b=batch, c=context: steps.measure(d, y, b, c),  # type: ignore[misc]
                        failures,
                    )
                    torch.cuda.empty_cache()
            for batch in () if "equality" in options.skip else (1, 4):
                guarded(
                    f"equality {name} {layout} b{batch}",
                    lambda d=drawn, y=layout, b=batch: steps.equality(d, y, b),  # type: ignore[misc]
                    failures,
                )
                torch.cuda.empty_cache()
            for context in options.lane_contexts if options.lanes and layout.startswith("1+1") else ():
                for batch in options.lanes:
                    guarded(
                        f"two lanes {name} {layout} b{batch} {context}",
                        lambda d=drawn, y=layout, b=batch, c=context: lanes.equal(d, y, b, c),  # type: ignore[misc]
                        failures,
                    )
                    torch.cuda.empty_cache()
            if "host" not in options.skip:
                guarded(f"host {name} {layout}", lambda d=drawn, y=layout: steps.host_us(d, y), failures)  # type: ignore[misc]
            if layout == "1+1" and name in options.pairs:
                all_drawn[name] = drawn
            del drawn
            torch.cuda.empty_cache()
            report.write(options.out)  # a run that is cut leaves what it has
    for pair in filter(None, options.pairs.split(",")):
        guarded(f"lanes {pair}", lambda p=pair: lanes.pair(all_drawn, p), failures)  # type: ignore[misc]
        torch.cuda.empty_cache()
        report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
