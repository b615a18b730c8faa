"""What does a layer of a short piece of a prompt cost the host in Python? No GPU: nothing is launched or multiplied.

    python -m benchmarks.bench_prefill_host [--models a,b] [--tokens 64] [--out DIRECTORY]

`attend`: attention's side of the layer and the sum of what the FFN gave back. `ffn`: the FFN's side. Processor time of
small models of every layer's kind; calls of the driver and of libraries are not in it (with them, on a GPU:
`bench_prefill_kernels`).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_step_host import small_spec
from benchmarks.full_models import CONFIGS
from benchmarks.ranks.without_devices import NoKernels, no_products
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan, padded_rows
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.kv_pool.geometry import page_geometry
from crosspool.units import MiB, ceil_div

SEED, PAGE_TOKENS = 7, 256
WARM_UP, COUNTED = 200, 2000
CPU = torch.device("cpu")


def used_us(work: Callable[[], object]) -> list[float]:
    """Microseconds of this thread's processor time for each of many calls."""
    found = []
    for _ in range(WARM_UP + COUNTED):
        begin_s = time.thread_time()
        work()
        found.append(1e6 * (time.thread_time() - begin_s))
    return found[WARM_UP:]


def measure(report: Report, name: str, tokens: int) -> None:
    """The last two layers of a model, which are alike."""
    whole = small_spec(name)
    spec = replace(whole, layers=whole.layers[-2:])
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=2 * MiB, kv_dtype="bfloat16", model=name)
    pages = ceil_div(tokens, PAGE_TOKENS)
    table = 1 + np.arange(geometry.frames_per_page * pages, dtype=np.int64).reshape(-1, pages)
    plan = chunk_plan(tokens, 1, spec.num_layers, tokens)
    rows = ChunkRows(
        token_ids=np.arange(tokens) % spec.vocab_size,
        positions=np.arange(tokens),
        row_of_token=np.zeros(tokens, dtype=np.int64),
        tables=[table],
    )
    arena = torch.empty(1 + table.size, 2 * MiB, dtype=torch.uint8)
    half = ChunkHalf(NoKernels(), spec, random_attention_weights(spec, SEED, CPU), arena, geometry, rows, plan)
    ffn = ChunkFFN(NoKernels(), random_ffn_weights(spec, SEED, CPU))
    (piece,) = plan.pieces
    sums = torch.zeros(tokens, spec.hidden_size)
    x = torch.zeros(padded_rows(tokens), spec.hidden_size, dtype=torch.bfloat16)

    def attend() -> None:
        half.attend(0, piece)
        half.add(0, piece, [sums])

    sides: dict[str, Callable[[], object]] = {
        f"{name}.t{tokens}.c0.attend": attend,
        f"{name}.t{tokens}.ffn": lambda: ffn.run(1, x, sums),
    }
    with no_products():
        for label, work in sides.items():
            found = used_us(work)
            report.samples(f"host_us.{label}", found, note="a layer, Python alone")
            print(f"host_us.{label}: {sorted(found)[len(found) // 2]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    report = Report("prefill_host", hardware="cpu", config={"layers": 2, "calls": COUNTED}, seed=SEED)
    report.summary = "Processor time of a layer of a piece on either rank; no device: Python alone."
    for name in options.models.split(","):
        measure(report, name, options.tokens)
        report.write(options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
