"""The merge of the splits that attention left; for few tokens' latents together with the projection behind it."""

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import AttentionParams, CombineParams, CombineUpParams, address, check
from crosspool.units import ceil_div

_VALUES, _WARPS = 128, 8
_SMEM_BYTES = _WARPS * (_VALUES + 2) * 4
_UP_LATENTS, _UP_BLOCKS = 512, 4
_UP_TILES = {128: 1, 256: 2}
"""By rows of a head: tiles of 16 rows that a group of four warps takes."""
_RED_BYTES = 160 * 4
MOST_UP_TOKENS = 1
"""Every token's blocks read the weights for themselves: for two of GLM-4.7-Flash it is the slower way already."""


def takes_up(kernels: Launcher, value_up: torch.Tensor, tokens: int) -> bool:
    """Whether `combine_up` has a kernel for value_up (heads, rows, kv_lora), and is the quicker way for `tokens`."""
    _heads, rows, latents = value_up.shape
    return kernels.has_clusters and tokens <= MOST_UP_TOKENS and latents == _UP_LATENTS and rows in _UP_TILES


def combine(
    kernels: Launcher,
    split: AttentionParams,
    tile: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    in_groups: bool,
) -> None:
    """out (tokens, heads, D_v) bf16: what the pass `split` left of every token and head, merged. tile: slots.

    in_groups: groups of splits first, whoever merges those.
    """
    tokens, heads, value_dim = out.shape
    params = _params(split, tile)
    params.sinks, params.out = address(sinks), address(out)
    kernels.launch(
        "attention",
        "attention_combine_groups" if in_groups else "attention_combine",
        grid=(ceil_div(value_dim, _VALUES), heads, tokens),
        threads=_WARPS * 32,
        smem_bytes=_SMEM_BYTES,
        params=params,
    )


def combine_up(kernels: Launcher, split: AttentionParams, tile: int, value_up: torch.Tensor, out: torch.Tensor) -> None:
    """out (tokens, heads, rows) bf16 = value_up (heads, rows, kv_lora) times what is merged, rounded to bf16 between.

    The bits are those of `combine` and `gemv` one after the other.
    """
    tokens, heads, rows = out.shape
    check("value_up", value_up, (heads, rows, _UP_LATENTS), torch.bfloat16)
    params = CombineUpParams(merge=_params(split, tile), weight=address(value_up), y=address(out), rows=rows)
    kernels.launch(
        "attention",
        f"attention_combine_up_{rows}",
        grid=(_UP_BLOCKS, heads, tokens),
        threads=_WARPS * 32,
        smem_bytes=_SMEM_BYTES + _UP_LATENTS * 2 + _WARPS * _UP_TILES[rows] * _RED_BYTES,
        params=params,
    )


def _params(split: AttentionParams, tile: int) -> CombineParams:
    return CombineParams(
        partial_o=split.partial_o,
        partial_ml=split.partial_ml,
        lengths=split.lengths,
        window=split.window,
        few_splits=split.few_splits,
        merge_blocks=split.merge_blocks,
        tile=tile,
        heads=split.heads,
        splits=split.splits,
        value_dim=split.value_dim,
    )
