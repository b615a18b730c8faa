"""Regions: which part of a checkpoint tensor a rank reads, and where it lands. Pure arithmetic, no I/O.

A rank's destination arrays have the canonical shapes (`models/tensors.py`) with the intermediate dimension cut to the
rank's slice of width w: gate, up (w, H), down (H, w), expert_gate_up (E, 2w, H) with the gate slice before the up
slice, expert_down (E, H, w). Router, choice bias and the shared expert's gate are whole on every rank. expert_down_bias
belongs to slice 0; the others add zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crosspool.models.families.family import Source
from crosspool.models.tensors import TensorSpec
from crosspool.weights_pool.placement import IntermediateSlice

SLICED_AXIS = {
    "gate": 0,
    "up": 0,
    "down": 1,
    "shared_gate": 0,
    "shared_up": 0,
    "shared_down": 1,
    "expert_gate_up": 1,
    "expert_gate_up_bias": 1,
    "expert_down": 2,
}
"""The intermediate dimension of each canonical FFN tensor that has one; it is twice as wide in `expert_gate_up*`."""

DOUBLED = frozenset({"expert_gate_up", "expert_gate_up_bias"})

ALL = slice(None)
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """Read `read` of the checkpoint tensor, take `pick` of it, swap its last two axes if `transpose`, write `index`.

    All indices are tuples of slices, so that no axis is lost; only `pick` may have strides.
    """

    read: Index
    index: Index
    pick: Index = ()
    transpose: bool = False


def intermediate_width(tensor: TensorSpec) -> int | None:
    """The full width of the dimension that ranks share out, or None where every rank holds the whole tensor."""
    axis = SLICED_AXIS.get(tensor.name) if tensor.pool == "weights" else None
    if axis is None:
        return None
    return tensor.shape[axis] // (2 if tensor.name in DOUBLED else 1)


def destination_shape(tensor: TensorSpec, part: IntermediateSlice | None) -> tuple[int, ...]:
    """The shape of `tensor` on a rank that holds `part` of its intermediate dimension."""
    if part is None:
        return tensor.shape
    axis = SLICED_AXIS[tensor.name]
    width = part.width * (2 if tensor.name in DOUBLED else 1)
    return (*tensor.shape[:axis], width, *tensor.shape[axis + 1 :])


def regions(source: Source, part: IntermediateSlice | None, max_elements: int) -> Iterator[Region]:
    """What a rank reads of `source`; regions of whole matrices are cut by rows to at most `max_elements`."""
    if part is None:
        yield from _rows(source.shape, max_elements)
        return
    low, width = slice(part.start, part.stop), part.width
    first, second = slice(0, width), slice(width, 2 * width)
    expert = slice(source.expert, source.expert + 1)
    match source.region:
        case "whole" if SLICED_AXIS[source.target.name] == 0:
            yield Region(read=(low, ALL), index=(ALL, ALL))
        case "whole":
            yield Region(read=(ALL, low), index=(ALL, ALL))
        case "expert_gate":
            yield Region(read=(low, ALL), index=(expert, first, ALL))
        case "expert_up":
            yield Region(read=(low, ALL), index=(expert, second, ALL))
        case "expert_down":
            yield Region(read=(ALL, low), index=(expert, ALL, ALL))
        case "fused":
            yield from _fused(source, part)
        case "fused_columns":
            yield from _fused_columns(source, part)


def _rows(shape: tuple[int, ...], max_elements: int) -> Iterator[Region]:
    row_elements = max(1, shape[1] if len(shape) > 1 else 1)
    step = max(1, max_elements // row_elements)
    for start in range(0, shape[0], step):
        rows = (slice(start, min(start + step, shape[0])), *[ALL] * (len(shape) - 1))
        yield Region(read=rows, index=rows)


def _fused(source: Source, part: IntermediateSlice) -> Iterator[Region]:
    """All experts in one tensor of the canonical shape, gate rows before up rows."""
    low, width = slice(part.start, part.stop), part.width
    full = source.target.shape[SLICED_AXIS[source.target.name]] // 2
    high = slice(full + part.start, full + part.stop)
    tail = (ALL,) * (len(source.shape) - 2)
    for idx in range(source.shape[0]):
        expert = slice(idx, idx + 1)
        if source.target.name in DOUBLED:
            yield Region(read=(expert, low, *tail), index=(expert, slice(0, width), *tail))
            yield Region(read=(expert, high, *tail), index=(expert, slice(width, 2 * width), *tail))
        else:
            yield Region(read=(expert, ALL, low), index=(expert, ALL, ALL))


def _fused_columns(source: Source, part: IntermediateSlice) -> Iterator[Region]:
    """gpt-oss: matrices stored as (in, out), gate in the even and up in the odd columns."""
    columns, width = slice(2 * part.start, 2 * part.stop), part.width
    halves = ((slice(0, width), slice(0, None, 2)), (slice(width, 2 * width), slice(1, None, 2)))
    for idx in range(source.shape[0]):
        expert = slice(idx, idx + 1)
        if source.target.name == "expert_down":
            rows = slice(part.start, part.stop)
            yield Region(read=(expert, rows, ALL), index=(expert, ALL, ALL), transpose=True)
            continue
        for half, pick in halves:
            if len(source.shape) == 2:
                yield Region(read=(expert, columns), pick=(ALL, pick), index=(expert, half))
            else:
                yield Region(
                    read=(expert, ALL, columns), pick=(ALL, ALL, pick), index=(expert, half, ALL), transpose=True
                )
