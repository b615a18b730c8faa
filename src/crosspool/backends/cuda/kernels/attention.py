"""Decode attention over the paged cache: a split pass that fills the GPU whatever the batch, then a merge.

Nothing is planned on the host: lengths and frame tables are read on the device, so one captured graph serves any
context. Kernels of known shapes also norm and rotate queries and write the tokens' own slots.
"""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.attention_variants import (
    choose_variant,
    key_value_dims,
    num_blocks,
    num_few_splits,
    num_kv_heads,
    num_splits,
    widened,
)
from crosspool.backends.cuda.kernels.combine import combine, combine_up
from crosspool.backends.cuda.kernels.panel_map import wide_params
from crosspool.backends.cuda.kernels.params import AttentionParams, GqaInput, MlaInput, address, check
from crosspool.backends.cuda.kernels.rope import rope_cache
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

LOG2_E = 1.4426950408889634
_ELEMENT_BYTES = 2
_ANY_TILE = 32
"""Slots of a tile of the kernel of any shape."""


@dataclass(frozen=True)
class AttentionScratch:
    """Partial results of the split pass, reused by every layer, and by every pass of a lane."""

    partial_o: torch.Tensor  # fp32, flat
    partial_ml: torch.Tensor  # fp32, flat
    q: torch.Tensor  # bf16, flat: queries for the kernel of any shape

    @classmethod
    def for_specs(
        cls,
        specs: set[GQASpec | MLASpec],
        tokens: int,
        num_sms: int,
        device: torch.device,
        held: "AttentionScratch | None" = None,
    ) -> "AttentionScratch":
        """Large enough for any of `specs` with up to `tokens` tokens: `held`, if that is."""
        most_o = most_ml = most_q = 0
        for spec in specs:
            key_dim, value_dim = key_value_dims(spec)
            most_q = max(most_q, tokens * spec.num_heads * key_dim)
            rows = tokens * num_splits(spec, num_sms) * spec.num_heads
            most_o = max(most_o, rows * value_dim)
            most_ml = max(most_ml, rows * 2)
        if held is not None and held.holds(most_o, most_ml, most_q):
            return held
        return cls(
            torch.empty(most_o, dtype=torch.float32, device=device),
            torch.empty(most_ml, dtype=torch.float32, device=device),
            torch.empty(most_q, dtype=torch.bfloat16, device=device),
        )

    def holds(self, num_o: int, num_ml: int, num_q: int) -> bool:
        return num_o <= self.partial_o.numel() and num_ml <= self.partial_ml.numel() and num_q <= self.q.numel()


def attention_decode(
    kernels: Launcher,
    spec: GQASpec | MLASpec,
    inputs: GqaInput | MlaInput,
    cache: PagedCache,
    layer: int,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
    *,
    splits: int,
    sinks: torch.Tensor | None = None,
    one_row_per_sequence: bool = False,
    value_up: torch.Tensor | None = None,
    any_shape: bool = False,
    overlap: bool = True,
) -> None:
    """out = softmax(scale q k^T) v over each token's first `lengths` slots (the last `sliding_window` of them).

    inputs: from `gqa_input` or `mla_input`. lengths: (tokens) int32 = positions + 1; the token's own slot is written.
    out: (tokens, heads, D_v) bf16, D_v = head_dim or kv_lora. value_up: (heads, rows, kv_lora), where `takes_up` says
    so; out is then its product with that, (tokens, heads, rows). splits: from `num_splits`; as many blocks as fill the
    GPU share them. any_shape: run the slow kernels that take every shape.
    one_row_per_sequence: no token attends to another token of the step (decode, not a chunk of a prompt): then one
    kernel norms, rotates, writes the cache and attends. NOTE: it reads lengths, frame table and earlier slots before it
    waits for the kernel before it, so nothing may write them within the same chain of overlapping kernels.
    """
    tokens, heads = len(lengths), spec.num_heads
    key_dim, value_dim = key_value_dims(spec)
    check("out", out, (tokens, heads, value_dim if value_up is None else value_up.shape[1]), torch.bfloat16)
    check("lengths", lengths, (tokens,), torch.int32)
    rows = tokens * splits * heads
    if rows * value_dim > scratch.partial_o.numel() or rows * 2 > scratch.partial_ml.numel():
        raise ValueError(
            f"scratch holds {scratch.partial_o.numel()} floats; {tokens} tokens x {splits} splits need more"
        )
    variant = None if any_shape else choose_variant(spec)
    q = scratch.q[: tokens * heads * key_dim].view(tokens, heads, key_dim)
    is_ready = variant is None or not one_row_per_sequence or not variant.makes_own(spec)
    blocks = min(splits, num_blocks(spec, tokens, kernels.num_sms))
    if variant is not None and not is_ready and kernels.has_warpgroups:
        variant = widened(variant, splits, blocks)
    if is_ready:
        rope_cache(kernels, spec, inputs, cache, layer, positions, q)
    ready = address(q if is_ready else None)
    params = attention_params(kernels, spec, cache, layer, lengths, scratch, splits, ready)
    setattr(params, "mla" if isinstance(spec, MLASpec) else "gqa", inputs)
    params.merge_blocks = blocks if variant is not None and variant.merges else 0
    kv_heads = num_kv_heads(spec)
    parts = heads if variant is None else kv_heads * ceil_div(heads // kv_heads, variant.heads)
    kernels.launch(
        "attention",
        "attention_any" if variant is None else variant.ready_name if is_ready else variant.name,
        grid=(parts, blocks, tokens),
        threads=32 if variant is None else variant.warps * 32,
        smem_bytes=value_dim * 4 if variant is None else variant.shared_bytes(tokens),
        params=wide_params(params, cache, layer) if variant is not None and variant.is_wide else params,
        overlap=overlap or is_ready,
    )
    tile = _ANY_TILE if variant is None else variant.tile
    if value_up is None:
        combine(kernels, params, tile, sinks, out, in_groups=isinstance(spec, MLASpec))
    else:
        combine_up(kernels, params, tile, value_up, out)


def attention_params(
    kernels: Launcher,
    spec: GQASpec | MLASpec,
    cache: PagedCache,
    layer: int,
    lengths: torch.Tensor,
    scratch: AttentionScratch,
    splits: int,
    q: int | None,
) -> AttentionParams:
    """What a split pass needs. q: where (tokens, heads, D_k) bf16 and all slots lie ready; None: made of its inputs."""
    key_dim, value_dim = key_value_dims(spec)
    is_mla, kv_heads = isinstance(spec, MLASpec), num_kv_heads(spec)
    window = None if isinstance(spec, MLASpec) else spec.sliding_window
    head_bytes = key_dim * _ELEMENT_BYTES
    return AttentionParams(
        q=q,
        cache=cache.view(layer),
        lengths=address(lengths),
        partial_o=address(scratch.partial_o),
        partial_ml=address(scratch.partial_ml),
        key_head_bytes=0 if is_mla else head_bytes,
        value_offset_bytes=0 if is_mla else kv_heads * head_bytes,
        value_head_bytes=0 if is_mla else head_bytes,
        heads=spec.num_heads,
        kv_heads=kv_heads,
        splits=splits,
        window=window or 0,
        few_splits=num_few_splits(spec, splits, kernels.num_sms),
        key_dim=key_dim,
        value_dim=value_dim,
        scale_log2=spec.softmax_scale * LOG2_E,
    )
