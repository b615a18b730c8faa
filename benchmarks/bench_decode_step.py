"""How long does one decode step take on 1 KV GPU and N weights GPUs, and where does the time go?

    python -m benchmarks.bench_decode_step [--out DIRECTORY] [--models a,b] [--layouts 1+1,1+2] [--batches 1,2]

Full-size models with seeded random weights (near-uniform routing) and a seeded cache. A layout `1+1s25` puts 25 % of
every FFN on the KV GPU beside attention. Steps are enqueued ahead and feed each other their tokens on the device. Parts
are timed by the same graphs without waits. Split logits are compared with those of one GPU that runs the same slices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model import Gpus, SplitModel, lanes_steps_per_s, step_times_ms
from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.lane_memory import WaitRule
from crosspool.backends.cuda.random_slices import random_ffn_slices
from crosspool.backends.cuda.undivided import UndividedDecoder
from crosspool.backends.cuda.weights import AttentionWeights, random_attention_weights
from crosspool.models.spec import ModelSpec, MoEFFNSpec
from crosspool.models.tensors import model_tensors, weight_bytes

TARGETS = {"qwen3-30b-a3b": 3.2, "glm-4.7-flash": 3.7, "deepseek-v2-lite": 2.3}
COPY_TB_PER_S = 4.25
SEED = 7

Slices = list[tuple[int, Sequence[FFNLayerWeights]]]


def parse_layout(layout: str, num_gpus: int) -> tuple[list[int], list[float] | None]:
    """GPUs of the weights ranks and their shares: `1+2`, or `1+1s25` with 25 % on the KV GPU."""
    weights = layout.split("+")[1]
    if "s" in weights:
        count, share = (int(part) for part in weights.split("s"))
        part = (1 - share / 100) / count
        return [*range(1, count + 1), 0], [part] * count + [share / 100]
    count = int(weights)
    if count >= num_gpus:
        raise ValueError(f"layout {layout} needs {count + 1} GPUs; this machine has {num_gpus}")
    return list(range(1, count + 1)), None


def step_floor_ms(spec: ModelSpec, batch: int, context: int, num_weights: int) -> float:
    """Bytes one step must read, each GPU at copy speed: all experts distinct, attention and FFN one after the other."""
    kv_bytes = weight_bytes(spec, "kv") - 2 * spec.vocab_size * spec.hidden_size  # of the embedding, only rows
    kv_bytes += batch * context * spec.kv_bytes_per_token("bfloat16")
    ffn_bytes = 0.0
    for tensor in model_tensors(spec):
        if tensor.pool != "weights" or tensor.layer is None:
            continue
        ffn = spec.layers[tensor.layer].ffn
        share = 1.0
        if isinstance(ffn, MoEFFNSpec) and tensor.name.startswith("expert_"):
            share = min(1.0, batch * ffn.top_k / ffn.num_experts)
        ffn_bytes += share * tensor.num_elements * (4 if tensor.name == "router" else 2) / num_weights
    return (kv_bytes + ffn_bytes) / COPY_TB_PER_S / 1e9


def draw_slices(gpus: Gpus, spec: ModelSpec, owners: list[int], shares: list[float] | None) -> Slices:
    layers = random_ffn_slices(spec, SEED, [gpus.devices[gpu] for gpu in owners], shares)
    for device in gpus.devices:
        torch.cuda.synchronize(device)
    return list(zip(owners, layers, strict=True))


def compare(gpus: Gpus, model: SplitModel, slices: Slices, context: int, steps: int = 3) -> int:
    """Steps whose split logits equal, bit for bit, those of GPU 0 running the same slices itself."""
    device = gpus.devices[0]
    copies = [
        tuple(type(layer)(**{key: _moved(value, device) for key, value in vars(layer).items()}) for layer in layers)
        for _, layers in slices
    ]
    whole = UndividedDecoder(model.half, [FFNHalf(gpus.kernels[0], layers, model.batch) for layers in copies])
    equal = 0
    for step in range(steps):
        model.rewind(context + step)
        ids = [3 + 7 * step + row for row in range(model.batch)]
        model.enqueue(ids)
        model.synchronize()
        split = model.half.logits_out.clone()
        model.half.logits_out.fill_(float("nan"))
        with torch.cuda.device(device):
            logits = whole.step()
            torch.cuda.synchronize(device)
        equal += int(torch.equal(split, logits) and bool(split.isfinite().all()))
    return equal


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "choice_bias"):  # the router's weights
        return type(value)(**{key: _moved(part, device) for key, part in vars(value).items()})
    return value


class Bench:
    """Runs and reports; models and slices are drawn once for all batches."""

    def __init__(self, gpus: Gpus, report: Report, out: Path) -> None:
        self.gpus, self.report, self.out = gpus, report, out
        self.alone: dict[tuple[str, str, int], dict[str, float]] = {}

    def measure(
        self,
        name: str,
        spec: ModelSpec,
        attention: AttentionWeights,
        slices: Slices,
        layout: str,
        batch: int,
        context: int,
    ) -> None:
        metric = f"decode_ms.{name}.{layout}.b{batch}.{context // 1024}k.graphs"
        parts = {}
        shares_gpu = any(gpu == 0 for gpu, _ in slices)
        variants: dict[str, dict[str, Any]] = {"": {}, ".fused": {"fused": True}}
        if batch == 1:
            variants |= {".flags": {"sums_by": "flags"}, ".route_kv": {"route": "kv"}}
            if not shares_gpu:
                early = WaitRule(deadline_s=0.3, early=True)
                variants[".early"] = {"rule": early}
                variants[".fused_early"] = {"fused": True, "rule": early}
        for label, options in variants.items():
            model = SplitModel(self.gpus, spec, attention, slices, batch=batch, context=context, seed=SEED, **options)
            times = step_times_ms(model, context)
            parts[label] = sorted(times)[len(times) // 2]
            floor = step_floor_ms(spec, batch, context, len(slices))
            self.report.samples(
                metric + label, times, limit=floor, note=f"bytes at {COPY_TB_PER_S} TB/s, one pool after the other"
            )
            if len(parts) == 1:
                unique = [int(half.scratch.routing.num_unique.item()) for half in model.ffn_halves]
                self.report.metric(f"{metric}.graph_mib", model.graph.num_bytes / 2**20)
                self.report.metric(f"{metric}.capture_ms", model.graph.seconds * 1e3)
                print(
                    f"{metric}{label}: {parts[label]:.3f} ms, floor {floor:.3f}, target {TARGETS[name]}, experts "
                    f"{unique}",
                    flush=True,
                )
            del model
        alone = self.alone[name, layout, batch] = self.parts(spec, attention, slices, batch, context)
        layers = spec.num_layers
        for label, value in alone.items():
            self.report.metric(f"{metric}.{label}_us_a_layer", value * 1e3 / layers)
        rest = parts[""] - alone["attention"] - alone["ffn"]
        self.report.metric(f"{metric}.crossing_us_a_layer", rest * 1e3 / layers, limit=2 * 2.75, note="two bare hops")
        print(
            f"  us a layer: attention {alone['attention'] * 1e3 / layers:.1f} (tail included), ffn "
            f"{alone['ffn'] * 1e3 / layers:.1f}, rest {rest * 1e3 / layers:.1f}; ms "
            f"{', '.join(f'{label[1:]} {value:.3f}' for label, value in parts.items() if label)}",
            flush=True,
        )

    def parts(
        self, spec: ModelSpec, attention: AttentionWeights, slices: Slices, batch: int, context: int
    ) -> dict[str, float]:
        """Milliseconds of each side's graph alone, without waits; of the slowest weights rank."""
        rule = WaitRule(deadline_s=None)
        model = SplitModel(
            self.gpus, spec, attention, slices, batch=batch, context=context, rule=rule, prefetches=False, seed=SEED
        )
        model.enqueue([5 + row for row in range(batch)])
        model.synchronize()
        found: dict[str, list[float]] = {"attention": [], "ffn": []}
        sides = [("attention", model.kv, model.graph)]
        sides += [("ffn", side, graph) for side, graph in zip(model.weights, model.ffn_graphs, strict=True)]
        step = 10
        for label, side, graph in sides:
            times = []
            for _ in range(9):
                step += 1
                if label == "attention":
                    ids = [5 + row for row in range(batch)]
                    side.lane.push(1024 * step, spec.num_layers, batch, ids, [context - 1] * batch)
                else:
                    side.lane.push(1024 * step, spec.num_layers)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with torch.cuda.stream(side.stream):
                    begin.record()
                    graph.replay()
                    end.record()
                side.stream.synchronize()
                times.append(begin.elapsed_time(end))
            found[label].append(sorted(times)[len(times) // 2])
        return {label: max(values) for label, values in found.items()}

    def equality(
        self, name: str, spec: ModelSpec, attention: AttentionWeights, slices: Slices, layout: str, batch: int
    ) -> None:
        model = SplitModel(self.gpus, spec, attention, slices, batch=batch, context=512, seed=SEED)
        equal = compare(self.gpus, model, slices, 512)
        self.report.metric(f"equal_steps.{name}.{layout}.b{batch}", equal, limit=3, note="bit for bit, of 3")
        print(f"equal_steps.{name}.{layout}.b{batch}: {equal} of 3", flush=True)

    def two_lanes(
        self,
        name: str,
        spec: ModelSpec,
        attention: AttentionWeights,
        slices: Slices,
        layout: str,
        context: int,
        alone: dict[str, float],
    ) -> None:
        """Steps a second of two lanes of the same model over those of one: the layer-wise pipeline."""
        lanes = [
            SplitModel(self.gpus, spec, attention, slices, batch=1, context=context, seed=SEED + idx)
            for idx in range(2)
        ]
        rates = {count: max(lanes_steps_per_s(lanes[:count], context) for _ in range(3)) for count in (1, 2)}
        if any(epoch for model in lanes for epoch in model.late()):
            raise RuntimeError("a wait of two lanes missed its deadline")
        bound = 1e3 / rates[1] / max(alone.values())
        self.report.metric(
            f"two_lanes_ratio.{name}.{layout}.b1",
            rates[2] / rates[1],
            limit=bound,
            note="one lane's step over the slower half alone",
        )
        print(f"two lanes {name} {layout}: {rates[2] / rates[1]:.2f} x one lane, bound {bound:.2f}", flush=True)

    def host_us(self, name: str, spec: ModelSpec, attention: AttentionWeights, slices: Slices, layout: str) -> None:
        """What the host does for one step of all ranks: records, replays and the token's read."""
        model = SplitModel(self.gpus, spec, attention, slices, batch=1, context=1024, seed=SEED)
        times = []
        for step in range(60):
            model.rewind(1024)
            begin = time.perf_counter()
            slot = model.enqueue([step])
            enqueued = time.perf_counter()
            model.synchronize()
            read = time.perf_counter()
            model.kv.lane.tokens(slot, 1)
            times.append((enqueued - begin + time.perf_counter() - read) * 1e6 / (1 + len(slices)))
        self.report.samples(
            f"host_us_per_step.{name}.{layout}", times[10:], limit=60, note="a rank's share; the target"
        )
        print(f"host_us_per_step: {sorted(times)[30]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--layouts", default="1+1")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=None, help="only the last so many layers")
    parser.add_argument("--no-equality", action="store_true")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    gpus, failures = Gpus(num_gpus), dict[str, str]()
    config = {"layouts": options.layouts, "context": options.context, "layers": options.layers or "all"}
    report = Report("decode_step", hardware=f"h200-x{num_gpus}", config=config, seed=SEED)
    report.summary = "Random weights at true shapes; crossing is what the step takes beyond both halves alone."
    bench = Bench(gpus, report, options.out)
    for name in options.models.split(","):
        spec = full_spec(name, options.layers)
        attention = random_attention_weights(spec, SEED, gpus.devices[0])
        for layout in options.layouts.split(","):
            drawn: list[Slices] = []

            def draw(spec: ModelSpec = spec, layout: str = layout, drawn: list[Slices] = drawn) -> None:
                owners, shares = parse_layout(layout, num_gpus)
                drawn.append(draw_slices(gpus, spec, owners, shares))

            guarded(f"draw {name} {layout}", draw, failures)
            if not drawn:
                continue
            for batch in map(int, options.batches.split(",")):
                guarded(
                    f"{name} {layout} b{batch}",
                    lambda n=name, s=spec, a=attention, d=drawn[0], y=layout, b=batch: bench.measure(  # type: ignore[misc]
                        n, s, a, d, y, b, options.context
                    ),
                    failures,
                )
                torch.cuda.empty_cache()
            if not options.no_equality:
                for batch in (1, 4):
                    guarded(
                        f"equality {name} {layout} b{batch}",
                        lambda n=name, s=spec, a=attention, d=drawn[0], y=layout, b=batch: bench.equality(  # type: ignore[misc]
                            n, s, a, d, y, b
                        ),
                        failures,
                    )
                    torch.cuda.empty_cache()
            if (name, layout, 1) in bench.alone:
                guarded(
                    f"two lanes {name} {layout}",
                    lambda n=name, s=spec, a=attention, d=drawn[0], y=layout: bench.two_lanes(  # type: ignore[misc]
                        n, s, a, d, y, options.context, bench.alone[n, y, 1]
                    ),
                    failures,
                )
            guarded(
                f"host {name} {layout}",
                lambda n=name, s=spec, a=attention, d=drawn[0], y=layout: bench.host_us(n, s, a, d, y),  # type: ignore[misc]
                failures,
            )
            drawn.clear()
            torch.cuda.empty_cache()
            (options.out / "partial.json").write_text(json.dumps(report.metrics, indent=1), encoding="utf-8")
        del attention
        torch.cuda.empty_cache()
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
