"""Which rank holds which part of an FFN: contiguous slices of the intermediate dimension.

A rank's slice of a layer is rows of gate and up and columns of down; its output is a partial sum, and the sums of all
ranks add up to the layer's output. Slices are multiples of 16, for kernels that move 16-byte vectors, and may be
uneven: 1408 over three ranks is 480, 464, 464.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from crosspool.units import ceil_div

SLICE_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class IntermediateSlice:
    """Elements `start` to `stop` (exclusive) of an intermediate dimension."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def intermediate_slices(width: int, num_slices: int, shares: Sequence[float] | None = None) -> list[IntermediateSlice]:
    """Cut `width` into `num_slices` contiguous slices, none of them empty; larger slices first where uneven.

    shares: relative size of each slice (all equal if None); each slice then gets the nearest number of units of 16.
    Where `width` itself is not a multiple of 16, the last slice is the one that is not.
    Raises ValueError if there are fewer units of 16 than slices, or if a share is not positive.
    """
    shares = [1.0] * num_slices if shares is None else list(shares)
    if num_slices < 1 or len(shares) != num_slices:
        raise ValueError(f"{len(shares)} shares for {num_slices} weights ranks; give one positive share for each rank")
    if not all(share > 0 for share in shares):
        raise ValueError(f"shares are {shares}; each weights rank needs a positive one")
    num_units = ceil_div(width, SLICE_MULTIPLE)
    if num_units < num_slices:
        raise ValueError(
            f"an FFN of width {width} cannot be cut into {num_slices} slices of multiples of {SLICE_MULTIPLE}; "
            f"use at most {num_units} weights ranks for this model"
        )
    slices, start = [], 0
    for units in _apportion(num_units, shares):
        stop = min(start + units * SLICE_MULTIPLE, width)
        slices.append(IntermediateSlice(start, stop))
        start = stop
    return slices


def _apportion(num_units: int, shares: Sequence[float]) -> list[int]:
    """Whole units in proportion to `shares`, at least one each; what is left goes to the largest remainders."""
    spare = num_units - len(shares)  # every slice has one unit for certain
    total = sum(shares)
    ideal = [max(0.0, num_units * share / total - 1) for share in shares]
    scale = spare / sum(ideal) if sum(ideal) > 0 else 0.0
    ideal = [units * scale for units in ideal]
    units = [int(unit) for unit in ideal]
    by_remainder = sorted(range(len(shares)), key=lambda idx: (units[idx] - ideal[idx], idx))
    for idx in by_remainder[: spare - sum(units)]:
        units[idx] += 1
    return [unit + 1 for unit in units]
