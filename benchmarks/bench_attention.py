"""How long does decode attention alone take (QK norms, rotation, cache write, split pass, merge) on one GPU?

    python -m benchmarks.bench_attention [--out DIRECTORY] [--contexts 4096,...] [--page-tokens 256]

Layers rotate through a cache of seeded values several times the size of L2; lengths beyond the model's are allowed.
Each layer starts when the one before has ended; `overlapped`: while it runs, as in a step. Pages have the size that the
models are served with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import copy_tb_per_s, guarded, replay_us, seeded_cache, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_decode
from crosspool.backends.cuda.kernels.attention_variants import key_value_dims, num_splits
from crosspool.backends.cuda.kernels.params import GqaInput, MlaInput
from crosspool.backends.cuda.kernels.rope import RopeTable, gqa_input, mla_input
from crosspool.kv_pool.geometry import PageGeometry, choose_page_tokens
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import MiB, ceil_div

KINDS = {"gqa": "qwen3-30b-a3b", "mla": "glm-4.7-flash", "mla16": "deepseek-v2-lite"}
OVERLAPPED = (4096, 32768)
ROTATE_BYTES = 400 * MiB
MAX_CACHE_BYTES = 40 << 30
SEED = 7


def measure(
    report: Report,
    kernels: DeviceKernels,
    kind: str,
    context: int,
    batch: int,
    tb_per_s: float,
    page_tokens: int | None,
    overlap: bool = False,
) -> None:
    model = full_spec(KINDS[kind])
    spec = model.layers[-1].attention
    layer_bytes = batch * context * spec.kv_elements_per_token * 2
    layers = max(1, min(48, ceil_div(ROTATE_BYTES, layer_bytes)))
    if layers * layer_bytes > MAX_CACHE_BYTES:
        return
    geometry = PageGeometry(
        num_layers=layers,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens or choose_page_tokens(model, 2 * MiB),
        frame_bytes=2 * MiB,
    )
    cache = seeded_cache(geometry, batch, context, SEED)
    _, value_dim = key_value_dims(spec)
    splits = num_splits(spec, kernels.num_sms)
    scratch = AttentionScratch.for_specs({spec}, batch, kernels.num_sms, kernels.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    positions = lengths - 1
    rope = RopeTable.allocate(spec.rope, batch, kernels.device)
    rope.update(kernels, positions)
    inputs, _keep = projections(spec, rope, batch)
    out = torch.empty(batch, spec.num_heads, value_dim, dtype=torch.bfloat16, device="cuda")
    units = max(layers, 8)

    def work() -> None:
        for unit in range(units):
            layer = unit % layers
            attention_decode(
                kernels,
                spec,
                inputs,
                cache,
                layer,
                positions,
                lengths,
                out,
                scratch,
                splits=splits,
                one_row_per_sequence=True,
                overlap=overlap,
            )

    times = replay_us(work, units=units, replays=30, warm_up_s=0.05, budget_s=0.1)
    floor = layer_bytes / tb_per_s / 1e6
    name = f"attention_us.{kind}.{context // 1024}k.b{batch}"
    name += ".overlapped" if overlap else ""
    report.samples(name, times, limit=floor, note=f"cache bytes at {tb_per_s:.2f} TB/s; {splits} splits")
    median = sorted(times)[len(times) // 2]
    print(f"{name}: {median:.2f} us, floor {floor:.2f}, {median / floor:.2f}x", flush=True)


def projections(
    spec: GQASpec | MLASpec, rope: RopeTable, tokens: int
) -> tuple[GqaInput | MlaInput, tuple[torch.Tensor, ...]]:
    """Random q, k, v of each token as attention takes them, and the tensors to keep alive."""
    if isinstance(spec, MLASpec):
        q_latent = torch.randn(tokens, spec.num_heads, spec.kv_lora_rank, device="cuda").bfloat16()
        q = torch.randn(tokens, spec.num_heads * spec.qk_head_dim, device="cuda").bfloat16()
        kv_a = torch.randn(tokens, spec.kv_elements_per_token, device="cuda").bfloat16()
        norm = torch.ones(spec.kv_lora_rank, device="cuda", dtype=torch.bfloat16)
        return mla_input(spec, rope, q_latent, q, kv_a, kv_a_norm=norm), (q_latent, q, kv_a, norm)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.randn(tokens, width, device="cuda").bfloat16()
    norm = torch.ones(spec.head_dim, device="cuda", dtype=torch.bfloat16)
    return gqa_input(spec, rope, qkv, q_norm=norm, k_norm=norm, eps=1e-6), (qkv, norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contexts", default="1024,4096,32768,131072,1048576")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--page-tokens", type=int)
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}
    tb_per_s = copy_tb_per_s()
    report = Report(
        "attention", hardware="h200", config={"page_tokens": options.page_tokens or "usual", "dtype": "bf16"}, seed=SEED
    )
    report.summary = "Decode attention alone (split pass and merge). Targets at 4K, batch 1: 6 us GQA, 7 us MLA."
    report.metric("copy_tb_per_s", tb_per_s)
    for kind in KINDS:
        for context in map(int, options.contexts.split(",")):
            for batch in map(int, options.batches.split(",")):
                guarded(
                    f"{kind} {context} b{batch}",
                    lambda kind=kind, context=context, batch=batch: measure(  # type: ignore[misc]
                        report, kernels, kind, context, batch, tb_per_s, options.page_tokens
                    ),
                    failures,
                )
                torch.cuda.empty_cache()
        for context in OVERLAPPED:
            guarded(
                f"{kind} {context} overlapped",
                lambda kind=kind, context=context: measure(  # type: ignore[misc]
                    report, kernels, kind, context, 1, tb_per_s, options.page_tokens, overlap=True
                ),
                failures,
            )
        report.write(options.out)  # a run that is cut keeps what it had
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
