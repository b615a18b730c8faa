"""Philox4x32-10, the counter-based random generator of every backend.

A token's random number is a pure function of its sequence's seed and its position, so it depends on no neighbour, no
batch and no history, and a replayed step draws the same. Source: Salmon et al., Parallel random numbers: as easy as
1, 2, 3 (SC 2011).
"""

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
NUM_ROUNDS = 10

BLOCK = 64
"""Positions whose numbers are computed at once."""


def philox4x32(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> UInt32Array:
    """(n, 4) random words from counters (n, 4), each word below 2^32, under one key of two words."""
    x0, x1, x2, x3 = (counter[:, idx].astype(np.uint64) for idx in range(4))
    key0, key1 = np.uint64(key[0]), np.uint64(key[1])
    for round_idx in range(NUM_ROUNDS):
        if round_idx:
            key0, key1 = (key0 + KEY_STEPS[0]) & LOW, (key1 + KEY_STEPS[1]) & LOW
        product0, product1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1 = (product1 >> HALF) ^ x1 ^ key0, product1 & LOW
        x2, x3 = (product0 >> HALF) ^ x3 ^ key1, product0 & LOW
    return np.stack([x0, x1, x2, x3], axis=1).astype(np.uint32)


def uniforms(seed: int, first_position: int, num_positions: int) -> npt.NDArray[np.float64]:
    """(num_positions,) numbers in (0, 1), `(x0 + 0.5) * 2^-32`, for consecutive token positions of one sequence.

    The key is the seed modulo 2^64, low word first; the counter is the position, low word first, then two zeros.
    """
    positions = np.arange(first_position, first_position + num_positions, dtype=np.uint64)
    counter = np.zeros((num_positions, 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1] = positions & LOW, positions >> HALF
    seed %= 1 << 64
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    result: npt.NDArray[np.float64] = (words[:, 0].astype(np.float64) + 0.5) * 2.0**-32
    return result


class UniformStream:
    """The random numbers of one sequence by position, computed a block at a time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = -BLOCK
        self._block: list[float] = []

    def at(self, position: int) -> float:
        first = position - position % BLOCK
        if first != self._first:
            self._block = uniforms(self._seed, first, BLOCK).tolist()
            self._first = first
        return self._block[position - first]
