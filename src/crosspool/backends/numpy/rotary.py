"""Rotary embedding as one complex multiplication.

A pair (a, b) turned by an angle is the complex number a + ib times e^(i angle). So the rows of every query and key
projection are reordered once, at load, until each pair lies side by side (`pair_order`); in a step, `rotate` views the
rotated part as complex64 and multiplies in place. Scores do not change, since queries and keys share the order; the
cache holds keys in it.
"""

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import FloatArray, IntArray
from crosspool.models.rope import attention_factor, inv_freq
from crosspool.models.spec import RopeSpec

ComplexArray = npt.NDArray[np.complex64]

FIRST_POSITIONS = 1024

STRETCH = 16
STRETCHES_KEPT = 32
"""Neighbouring positions whose rotations are copied for every head at once, and how many such copies are kept."""


def pair_order(rope: RopeSpec, width: int) -> IntArray:
    """(width,) source index of each element, such that pairs are adjacent; what is not rotated stays behind them."""
    order = np.arange(width)
    if not rope.interleaved:
        order[: rope.dim] = order[: rope.dim].reshape(2, rope.dim // 2).T.ravel()
    return order


class RotaryTable:
    """e^(i angle) times the attention factor, by position; grows to the longest position seen."""

    def __init__(self, rope: RopeSpec) -> None:
        self.dim = rope.dim
        self._inv_freq = inv_freq(rope)
        self._factor = attention_factor(rope)
        self._turns = self._compute(FIRST_POSITIONS)
        self._stretches: dict[tuple[int, int], ComplexArray] = {}

    def turns(self, positions: IntArray, num_heads: int = 1) -> ComplexArray:
        """(num_tokens, num_heads, dim / 2), the same for every head.

        NumPy multiplies arrays of one shape three times as fast as it broadcasts, so few tokens are worth the copies;
        those of a lone token are kept for its neighbours.
        """
        if len(positions) == 1 and num_heads > 1:
            stretch, place = divmod(positions.item(), STRETCH)
            return self._stretch(stretch, num_heads)[place : place + 1]
        needed = int(positions.max()) + 1
        if needed > len(self._turns):
            self._turns = self._compute(max(needed, 2 * len(self._turns)))
        turns = self._turns[positions][:, None, :]
        return turns if num_heads == 1 else turns.repeat(num_heads, axis=1)

    def _stretch(self, stretch: int, num_heads: int) -> ComplexArray:
        """(STRETCH, num_heads, dim / 2) of neighbouring positions."""
        found = self._stretches.get((stretch, num_heads))
        if found is None:
            if len(self._stretches) == STRETCHES_KEPT:
                self._stretches.clear()
            positions = np.arange(stretch * STRETCH, (stretch + 1) * STRETCH)
            found = self._stretches[stretch, num_heads] = self.turns(positions, num_heads)
        return found

    def _compute(self, num_positions: int) -> ComplexArray:
        angles = np.arange(num_positions, dtype=np.float64)[:, None] * self._inv_freq
        turns: ComplexArray = (np.exp(1j * angles) * self._factor).astype(np.complex64)
        return turns


def rotate(x: FloatArray, turns: ComplexArray) -> None:
    """Turn the pairs of `x` in place. x: (..., heads, dim), last axis contiguous, in `pair_order`."""
    pairs = x.view(np.complex64)
    np.multiply(pairs, turns, out=pairs)
