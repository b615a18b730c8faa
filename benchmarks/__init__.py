"""Measurements that are kept. A script that needs a GPU says so in one line where there is none, and what runs instead.

It is said here, before the script itself is imported, since most of them cannot even be imported without CUDA.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

ALIKE_ON_CPUS: dict[str, str] = {
    "ablation": "the same with --backend numpy",
    "decode_step": "benchmarks.bench_numpy_decode",
    "host_tier_gpu": "benchmarks.bench_host_tier",
    "kv_pool_gpu": "benchmarks.bench_kv_pool",
    "prefill_kernels": "benchmarks.bench_prefill_host, of what the host does",
    "recovery": "the same with --backend numpy",
    "split_kv_gpu": "benchmarks.bench_split_kv",
    "step_host": "the same with --no-devices",
}
"""Scripts for GPUs that have another for the NumPy backend, or are one where they are asked to."""

FOR_GPUS = frozenset(
    {
        *ALIKE_ON_CPUS,
        "attention",
        "attention_half",
        "beside_prompts",
        "control",
        "device_loop",
        "equality",
        "ffn_server",
        "ffn_stress",
        "hop",
        "invariance",
        "kv_ranks_gpu",
        "lanes",
        "lanes_steady",
        "long_request",
        "moe_layer",
        "page_cache",
        "prefill",
        "prefill_dedicated",
        "reload",
        "serve_gpus",
        "serve_http",
        "swap",
        "trace",
    }
)
"""Names behind `bench_`."""


def missing_gpu(words: Sequence[str], has_driver: bool) -> str | None:
    """What to say instead of running the command line of `words` (`sys.orig_argv`); None where it can run."""
    script = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    name = script.removeprefix("benchmarks.bench_")
    is_asked_for_help = {"-h", "--help"} & set(words)
    needs_none = bool({"numpy", "--backend=numpy", "--no-devices"} & set(words))
    if has_driver or name not in FOR_GPUS or name == script or is_asked_for_help or needs_none:
        return None
    instead = f"on CPUs there is {ALIKE_ON_CPUS[name]}" if name in ALIKE_ON_CPUS else "nothing like it runs on CPUs"
    return f"{script} measures NVIDIA GPUs, and this machine has no driver for one; {instead}"


def _has_driver() -> bool:
    """Looked at without starting it: scripts may still choose among the GPUs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if said := missing_gpu(sys.orig_argv, _has_driver()):
    raise SystemExit(f"error: {said}")
