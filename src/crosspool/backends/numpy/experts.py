"""Experts: one matrix of every expert of a layer, and the products of rows with those that a router chose."""

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.matrices import panels

Group = int | slice
"""Rows of one expert: the only one, or several that lie together."""


class Experts:
    """Matrices (in, out), each in panels."""

    def __init__(self, matrices: FloatArray) -> None:
        """matrices: (experts, in, out)."""
        packed = panels(matrices)
        is_whole = packed.shape[1] == 1
        self._matrices = list(packed[:, 0] if is_whole else packed)
        self._shape = (packed.shape[3],) if is_whole else (packed.shape[1], packed.shape[3])  # of a row of products
        self._multiply = np.ndarray.dot if is_whole else np.matmul

    def of_one(self, x: FloatArray, experts: Sequence[int]) -> FloatArray:
        """(k, out): the vector (in,) by each expert's matrix."""
        return self._of_each(repeat(x), experts)

    def of_each(self, rows: FloatArray, experts: Sequence[int]) -> FloatArray:
        """(k, out): row i of (k, in) by the matrix of expert i."""
        return self._of_each(rows, experts)

    def _of_each(self, rows: Iterable[FloatArray], experts: Sequence[int]) -> FloatArray:
        matrices, multiply = self._matrices, self._multiply
        products = np.empty((len(experts), *self._shape), dtype=np.float32)
        for row, expert, out in zip(rows, experts, products, strict=False):  # `rows` may have no end
            multiply(row, matrices[expert], out)
        return products.reshape(len(experts), -1)

    def of_groups(self, rows: FloatArray, groups: Iterable[tuple[int, Group]]) -> FloatArray:
        """(pairs, out) from rows (pairs, in), sorted into groups of one expert each."""
        products = np.empty((len(rows), *self._shape), dtype=np.float32)
        by_panel = products if products.ndim == 2 else products.swapaxes(0, 1)
        for expert, group in groups:
            self._multiply(rows[group], self._matrices[expert], by_panel[..., group, :])
        return products.reshape(len(rows), -1)
