"""Does an answer depend on what else runs? One prompt alone, in batches, and beside another's chunk.

    python -m benchmarks.bench_invariance [--parts kernels,engine] [--models a,b] [--layers N] [--gpus 2] [--tokens 48]

`kernels` compares bits on one GPU; `engine` compares an answer's greedy tokens through engine, ranks and scheduler, and
says at which token they part. Random weights of the models' true shapes: near ties are frequent, so any different bit
shows soon.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.report import RESULTS, Report
from crosspool.units import MiB


def kernels(report: Report, names: Sequence[str], num_layers: int | None) -> None:
    import torch

    from benchmarks.invariance.kernels import (
        PAGE_TOKENS,
        OneDevice,
        chunks,
        decode_in_batches,
        passes_as_decode,
        products,
    )
    from crosspool.backends.cuda.device.launch import DeviceKernels
    from crosspool.backends.cuda.loading.weights import pack_attention_weights, pack_ffn_weights, random_layers
    from crosspool.kv_pool.geometry import page_geometry

    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    for name in names:
        spec = full_spec(name, num_layers)
        loose: dict[str, torch.Tensor] = {}
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for pool in ("kv", "weights"):
            for layer, members in random_layers(spec, pool, 11, device):
                (loose if layer is None else layers.setdefault(layer, {})).update(members)
        ordered = [layers[index] for index in range(spec.num_layers)]
        model = OneDevice(
            DeviceKernels(device),
            spec,
            pack_attention_weights(spec, loose, iter(ordered)),
            pack_ffn_weights(spec, iter(ordered)),
            page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=2 * MiB),
            32,
            4224,
        )
        decode_in_batches(report, model, name, (100, 1500, 4096))
        passes_as_decode(report, model, name, list(range(40, 64)))
        products(report, model, name)
        chunks(report, model, name, spec.vocab_size)
        del model, layers, ordered, loose
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="kernels,engine")
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--layers", type=int, default=0, help="of every model; 0: all")
    parser.add_argument("--kernel-layers", type=int, default=6, help="of every model in `kernels`")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=20)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--parent", type=Path, help="directory that holds the models' directories, with weights")
    parser.add_argument("--prompts", default="20,700,3000", help="tokens")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--long", type=int, default=12000, help="tokens of the prompt whose chunks run beside")
    parser.add_argument("--batch-invariant", action="store_true", help="as of `crosspool serve`")
    parser.add_argument("--settle-s", type=float, default=0.4)
    parser.add_argument("--vocab", type=int, default=100_000, help="ids of prompts are below")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = Report(
        "invariance",
        hardware="h200-x2" if options.gpus == 2 else "h200",
        config={
            "models": options.models,
            "layers": options.layers,
            "tokens": options.tokens,
            "batch_invariant": options.batch_invariant,
        },
        seed=11,
    )
    report.summary = (
        "An answer alone, in batches and beside chunks, on random weights: 1 where bits or tokens are the same."
    )
    if "kernels" in options.parts:
        kernels(report, options.models.split(","), options.kernel_layers)
    if "engine" in options.parts:
        from benchmarks.invariance.engine import answers  # needs the packages of the server

        asyncio.run(answers(report, options))
    report.write(options.out)


if __name__ == "__main__":
    main()
