"""Decode attention over the paged cache: a split pass that fills the GPU whatever the batch, then a merge.

Nothing is planned on the host: lengths and frame tables are read on the device, so one captured graph serves any
context. The number of splits is fixed by batch and heads alone.
"""

import math
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import AttentionParams, CombineParams, address, check
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

LOG2_E = 1.4426950408889634
MAX_SPLITS = 256
_ELEMENT_BYTES = 2
_COMBINE_VALUES = 128


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel: its name, the query heads a block takes, and its shared memory."""

    name: str
    heads: int
    smem_bytes: int
    threads: int = 128
    tile: int = 64


def _smem(key: int, value: int, cols: int, tile: int, stages: int) -> int:
    """Shared memory of the kernel template, `Attention<key, value, ...>::SMEM`; value 0 where keys hold the values."""
    k_row, v_row = key * 2 + 16, value * 2 + 16 if value else 0
    k_parts = 4 // (tile // 16)
    return (
        stages * tile * (k_row + v_row)
        + cols * k_row
        + k_parts * cols * (tile + 4) * 4
        + cols * (tile * 2 + 16)
        + cols * 4
    )


GQA_VARIANTS: dict[int, tuple[Variant, ...]] = {
    64: (Variant("attention_gqa_d64_h8", 8, _smem(64, 64, 8, 64, 4)),),
    128: (
        Variant("attention_gqa_d128_h8", 8, _smem(128, 128, 8, 64, 3)),
        Variant("attention_gqa_d128_h16", 16, _smem(128, 128, 16, 64, 3)),
    ),
    256: (Variant("attention_gqa_d256_h8", 8, _smem(256, 256, 8, 64, 3)),),
}
"""By head_dim, narrowest first."""

MLA_VARIANTS: dict[tuple[int, int], tuple[Variant, ...]] = {
    (512, 64): (
        Variant("attention_mla_l512_r64_h16", 16, _smem(576, 0, 16, 32, 4), tile=32),
        Variant("attention_mla_l512_r64_h24", 24, _smem(576, 0, 24, 32, 4), tile=32),
    )
}
"""By (kv_lora_rank, qk_rope_head_dim)."""


def choose_variant(spec: GQASpec | MLASpec) -> Variant | None:
    """The kernel that takes a KV head's query heads in the fewest blocks; None: only the kernel for any shape fits."""
    if isinstance(spec, MLASpec):
        variants = MLA_VARIANTS.get((spec.kv_lora_rank, spec.qk_rope_head_dim), ())
        group = spec.num_heads
    else:
        variants = GQA_VARIANTS.get(spec.head_dim, ())
        group = spec.num_heads // spec.num_kv_heads
    if not variants:
        return None
    return min(variants, key=lambda variant: (ceil_div(group, variant.heads), variant.heads))


def key_value_dims(spec: GQASpec | MLASpec) -> tuple[int, int]:
    """Width of a query and of a value as the cache sees them."""
    if isinstance(spec, MLASpec):
        return spec.kv_lora_rank + spec.qk_rope_head_dim, spec.kv_lora_rank
    return spec.head_dim, spec.head_dim


def num_splits(spec: GQASpec | MLASpec, tokens: int, num_sms: int) -> int:
    """Splits of each token's slots, so that a batch fills the GPU about once."""
    variant = choose_variant(spec)
    kv_heads = 1 if isinstance(spec, MLASpec) else spec.num_kv_heads
    if variant is None:
        return max(1, min(8, num_sms // (tokens * spec.num_heads)))
    per_token = kv_heads * ceil_div(spec.num_heads // kv_heads, variant.heads)
    return max(1, min(MAX_SPLITS, num_sms // (tokens * per_token)))


@dataclass(frozen=True)
class AttentionScratch:
    """Partial results of the split pass, reused by every layer."""

    partial_o: torch.Tensor  # fp32, flat
    partial_ml: torch.Tensor  # fp32, flat

    @classmethod
    def for_specs(
        cls, specs: set[GQASpec | MLASpec], tokens: int, num_sms: int, device: torch.device
    ) -> "AttentionScratch":
        """Large enough for any of `specs` with up to `tokens` tokens."""
        most_o = most_ml = 0
        for spec in specs:
            for count in range(1, tokens + 1):
                rows = count * num_splits(spec, count, num_sms) * spec.num_heads
                most_o = max(most_o, rows * key_value_dims(spec)[1])
                most_ml = max(most_ml, rows * 2)
        return cls(
            torch.empty(most_o, dtype=torch.float32, device=device),
            torch.empty(most_ml, dtype=torch.float32, device=device),
        )


def attention_decode(
    kernels: Launcher,
    spec: GQASpec | MLASpec,
    cache: PagedCache,
    layer: int,
    q: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
    *,
    splits: int,
    sinks: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
    any_shape: bool = False,
    overlap: bool = True,
) -> None:
    """out = softmax(scale q k^T) v over each token's first `lengths` slots (the last `sliding_window` of them).

    q: (tokens, heads, D) bf16, D = head_dim, or kv_lora + rope with absorbed queries. lengths: (tokens) int32, the
    token's own slot included. out: (tokens, heads, D_v) bf16, D_v = head_dim or kv_lora. splits: from `num_splits`.
    any_shape: run the slow kernel that takes every shape.
    """
    tokens, heads = q.shape[0], spec.num_heads
    key_dim, value_dim = key_value_dims(spec)
    check("q", q, (tokens, heads, key_dim), torch.bfloat16)
    check("out", out, (tokens, heads, value_dim), torch.bfloat16)
    check("lengths", lengths, (tokens,), torch.int32)
    rows = tokens * splits * heads
    if rows * value_dim > scratch.partial_o.numel() or rows * 2 > scratch.partial_ml.numel():
        raise ValueError(
            f"scratch holds {scratch.partial_o.numel()} floats; {tokens} tokens x {splits} splits need more"
        )
    is_mla = isinstance(spec, MLASpec)
    kv_heads = 1 if isinstance(spec, MLASpec) else spec.num_kv_heads
    window = None if isinstance(spec, MLASpec) else spec.sliding_window
    head_bytes = key_dim * _ELEMENT_BYTES
    params = AttentionParams(
        q=address(q),
        cache=cache.view(layer),
        lengths=address(lengths),
        table_rows=address(table_rows),
        partial_o=address(scratch.partial_o),
        partial_ml=address(scratch.partial_ml),
        key_head_bytes=0 if is_mla else head_bytes,
        value_offset_bytes=0 if is_mla else kv_heads * head_bytes,
        value_head_bytes=0 if is_mla else head_bytes,
        heads=heads,
        kv_heads=kv_heads,
        splits=splits,
        window=window or 0,
        key_dim=key_dim,
        value_dim=value_dim,
        scale_log2=spec.softmax_scale * LOG2_E,
    )
    variant = None if any_shape else choose_variant(spec)
    if variant is None:
        kernels.launch(
            "attention",
            "attention_any",
            grid=(splits, heads, tokens),
            threads=32,
            smem_bytes=value_dim * 4,
            params=params,
            overlap=overlap,
        )
    else:
        blocks = kv_heads * ceil_div(heads // kv_heads, variant.heads)
        kernels.launch(
            "attention",
            variant.name,
            grid=(splits, blocks, tokens),
            threads=variant.threads,
            smem_bytes=variant.smem_bytes,
            params=params,
            overlap=overlap,
        )
    combine = CombineParams(
        partial_o=address(scratch.partial_o),
        partial_ml=address(scratch.partial_ml),
        sinks=address(sinks),
        out=address(out),
        heads=heads,
        splits=splits,
        value_dim=value_dim,
    )
    aligned_splits = math.ceil(splits / 4) * 4
    kernels.launch(
        "attention",
        "attention_combine",
        grid=(ceil_div(value_dim, _COMBINE_VALUES), heads, tokens),
        threads=256,
        smem_bytes=(aligned_splits + 32 + 8 * _COMBINE_VALUES) * 4,
        params=combine,
    )
