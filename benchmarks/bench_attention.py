"""How long does decode attention alone take, split pass and merge, over a paged cache on one GPU?

    python -m benchmarks.bench_attention [--out DIRECTORY] [--contexts 4096,...]

Layers rotate through a cache of seeded values several times the size of L2; lengths beyond the model's are allowed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import copy_tb_per_s, guarded, replay_us, seeded_cache, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.attention import AttentionScratch, attention_decode, key_value_dims, num_splits
from crosspool.backends.cuda.launch import DeviceKernels
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.units import MiB, ceil_div

KINDS = {"gqa": "qwen3-30b-a3b", "mla": "glm-4.7-flash", "mla16": "deepseek-v2-lite"}
TARGET_4K = {"gqa": 6.0, "mla": 7.0, "mla16": 7.0}
ROTATE_BYTES = 400 * MiB
MAX_CACHE_BYTES = 40 << 30
PAGE_TOKENS = 256
SEED = 7


def measure(report: Report, kernels: DeviceKernels, kind: str, context: int, batch: int, tb_per_s: float) -> None:
    spec = full_spec(KINDS[kind]).layers[-1].attention
    layer_bytes = batch * context * spec.kv_elements_per_token * 2
    layers = max(1, min(48, ceil_div(ROTATE_BYTES, layer_bytes)))
    if layers * layer_bytes > MAX_CACHE_BYTES:
        return
    geometry = PageGeometry(
        num_layers=layers,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=PAGE_TOKENS,
        frame_bytes=2 * MiB,
    )
    cache = seeded_cache(geometry, batch, context, SEED)
    key_dim, value_dim = key_value_dims(spec)
    num_sms = torch.cuda.get_device_properties(kernels.device).multi_processor_count
    splits = num_splits(spec, batch, num_sms)
    scratch = AttentionScratch.for_specs({spec}, batch, num_sms, kernels.device)
    q = torch.randn(batch, spec.num_heads, key_dim, device="cuda").bfloat16()
    out = torch.empty(batch, spec.num_heads, value_dim, dtype=torch.bfloat16, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    units = max(layers, 8)

    def work() -> None:
        for unit in range(units):
            layer = unit % layers
            attention_decode(kernels, spec, cache, layer, q, lengths, out, scratch, splits=splits, overlap=False)

    times = replay_us(work, units=units, replays=30)
    floor = layer_bytes / tb_per_s / 1e6
    name = f"attention_us.{kind}.{context // 1024}k.b{batch}"
    report.samples(name, times, limit=floor, note=f"cache bytes at {tb_per_s:.2f} TB/s; {splits} splits")
    median = sorted(times)[len(times) // 2]
    print(f"{name}: {median:.2f} us, floor {floor:.2f}, {median / floor:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contexts", default="4096,32768,131072,1048576")
    parser.add_argument("--batches", default="1,2,4,8")
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}
    tb_per_s = copy_tb_per_s()
    report = Report("attention", hardware="h200", config={"page_tokens": PAGE_TOKENS, "dtype": "bf16"}, seed=SEED)
    report.summary = "Decode attention alone (split pass and merge). Targets at 4K, batch 1: 6 us GQA, 7 us MLA."
    report.metric("copy_tb_per_s", tb_per_s)
    for kind in KINDS:
        for context in map(int, options.contexts.split(",")):
            for batch in map(int, options.batches.split(",")):
                guarded(
                    f"{kind} {context} b{batch}",
                    lambda kind=kind, context=context, batch=batch: measure(  # type: ignore[misc]
                        report, kernels, kind, context, batch, tb_per_s
                    ),
                    failures,
                )
                torch.cuda.empty_cache()
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
