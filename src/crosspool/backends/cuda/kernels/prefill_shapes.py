"""Which shapes the prefill kernel takes, and how it and a library are cut for one."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from crosspool.backends.cuda.chunks.prefill_blocks import NO_SPANS, SPAN_SIZES, SpanSizes
from crosspool.models.spec import GQASpec, MLASpec

if TYPE_CHECKING:
    import torch

EXPANDED_KEYS = 8192
"""Latents that are expanded at once: GLM's take 168 MB."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel is cut for one shape, by measurement on an H200."""

    rows: int = 128
    keys: int = 128
    warps: int = 8
    stages: int = 2


@cache
def split_dim(size: int) -> tuple[int, int]:
    """`size` as a sum of two powers of two that the kernel multiplies (the second may be 0); ValueError elsewhere."""
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    if first < 16 or (rest and (rest < 16 or rest & (rest - 1))):
        raise ValueError(f"heads of {size} elements; the prefill kernel takes sums of two powers of two from 16 on")
    return first, rest


def key_dim(spec: GQASpec | MLASpec) -> int:
    return spec.qk_head_dim if isinstance(spec, MLASpec) else spec.head_dim


def takes_shape(spec: GQASpec | MLASpec) -> bool:
    """Whether the prefill kernel takes this shape; others run through the decode kernels."""
    try:
        split_dim(key_dim(spec))
    except ValueError:
        return False
    return not isinstance(spec, MLASpec) or spec.qk_nope_head_dim % 8 == 0


def tile_of(spec: GQASpec | MLASpec) -> Tile:
    """The measured cut of a shape."""
    widest = max(key_dim(spec), spec.v_head_dim) if isinstance(spec, MLASpec) else spec.head_dim
    return _NARROW if widest <= 128 else _WIDE


_NARROW, _WIDE = Tile(), Tile(keys=64)


def span_sizes(spec: GQASpec | MLASpec, device: "torch.device") -> SpanSizes:
    """The library's sizes where it has a fast kernel for the shape; on an H200 it is 1.7 times as fast as ours."""
    if isinstance(spec, GQASpec) and (spec.sinks or spec.sliding_window is not None):
        return NO_SPANS
    import torch

    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return SPAN_SIZES if is_hopper and key_dim(spec) <= 256 and key_dim(spec) % 8 == 0 else NO_SPANS
