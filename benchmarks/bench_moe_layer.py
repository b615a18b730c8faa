"""How long does one MoE layer take for a few tokens, router included, on one GPU?

    python -m benchmarks.bench_moe_layer [--out DIRECTORY] [--models qwen3-30b-a3b,...] [--fused]

Layers rotate, so weights come from device memory. The first kernel of a layer does not overlap the layer before it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import copy_tb_per_s, guarded, replay_us, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.moe import ffn
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.models.spec import MoEFFNSpec

TARGETS = {"qwen3-30b-a3b": {1: 28.0, 2: 46.0, 4: 82.0, 8: 158.0}}
NUM_LAYERS = 12
SEED = 7


def choose_distinct(layer: FFNLayerWeights, x: torch.Tensor) -> None:
    """Give the layer a router that sends every token of `x` to experts no other token uses."""
    assert isinstance(layer.spec, MoEFFNSpec)
    assert layer.router is not None
    top_k = layer.spec.top_k
    experts = torch.randperm(layer.spec.num_experts, device=x.device)
    rows = x.float() / x.float().square().sum(-1, keepdim=True)
    layer.router.weight.mul_(0.01)
    for token in range(len(x)):
        for choice, expert in enumerate(experts[token * top_k : (token + 1) * top_k].tolist()):
            layer.router.weight[expert] += (4.0 + 0.1 * choice) * rows[token]


def layer_bytes(layer: FFNLayerWeights, unique_experts: float) -> float:
    """Weight bytes one layer must read: each chosen expert once, the shared expert, the router."""
    hidden = layer.hidden
    router = 0 if layer.router is None else layer.router.weight.numel() * 4
    return router + 2 * 3 * hidden * (unique_experts * layer.width + layer.shared_width)


def measure(
    report: Report, kernels: DeviceKernels, name: str, tb_per_s: float, batches: list[int], fused: bool
) -> None:
    spec = full_spec(name, NUM_LAYERS)
    for routing in ("uniform", "distinct"):
        layers = random_ffn_weights(spec, SEED, kernels.device)
        for batch in batches:
            moe = layers[0].spec
            assert isinstance(moe, MoEFFNSpec)
            if routing == "distinct" and batch * moe.top_k > moe.num_experts:
                continue
            generator = torch.Generator(device="cuda").manual_seed(SEED + batch)
            x = torch.randn(batch, spec.hidden_size, device="cuda", generator=generator).bfloat16()
            out = torch.empty(batch, spec.hidden_size, dtype=torch.float32, device="cuda")
            half = FFNHalf(kernels, layers, batch)
            unique = []
            for layer in layers:
                if routing == "distinct":
                    choose_distinct(layer, x)
                ffn(kernels, layer, x, out, half.scratch, fused=fused)
                unique.append(half.scratch.routing.num_unique.item())
            mean_unique = sum(unique) / len(unique)

            def work(
                layers: tuple[FFNLayerWeights, ...] = layers,
                x: torch.Tensor = x,
                out: torch.Tensor = out,
                half: FFNHalf = half,
            ) -> None:
                for layer in layers:
                    ffn(kernels, layer, x, out, half.scratch, overlap=False, fused=fused)

            times = replay_us(work, units=len(layers))
            floor = layer_bytes(layers[0], mean_unique) / tb_per_s / 1e6
            suffix = "" if routing == "distinct" else ".uniform"
            note = f"bytes at {tb_per_s:.2f} TB/s; {mean_unique:.1f} unique experts a layer"
            report.samples(f"moe_us.{name}.b{batch}{suffix}", times, limit=floor, note=note)
            median = sorted(times)[len(times) // 2]
            target = TARGETS.get(name, {}).get(batch) if routing == "distinct" else None
            goal = f" target {target}" if target else ""
            print(
                f"{name} b{batch} {routing}: {median:.1f} us, floor {floor:.1f} ({floor / median:.0%}){goal}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--batches", default="1,2,4,8,12,16,24,32")
    parser.add_argument("--other-batches", default="", help="of models behind the first; default: the same")
    parser.add_argument("--fused", action="store_true", help="router and FFN as one cooperative kernel")
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}
    tb_per_s = copy_tb_per_s()
    report = Report(
        "moe_layer_fused" if options.fused else "moe_layer",
        hardware="h200",
        config={"num_layers": NUM_LAYERS, "dtype": "bf16", "fused": options.fused},
        seed=SEED,
    )
    report.summary = "One MoE layer, router included; `uniform`: random routing, else all experts distinct."
    report.metric("copy_tb_per_s", tb_per_s)
    chosen = options.batches
    for name in options.models.split(","):
        batches = [int(batch) for batch in chosen.split(",")]
        guarded(name, lambda n=name, b=batches: measure(report, kernels, n, tb_per_s, b, options.fused), failures)  # type: ignore[misc]
        chosen = options.other_batches or chosen
        torch.cuda.empty_cache()
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
