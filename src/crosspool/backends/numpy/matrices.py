"""How matrices lie in memory, (in, out), and how rows are multiplied by them at full speed.

For 2 to 16 rows OpenBLAS takes up to five times as long when the right operand is a transposed view, which is what a
checkpoint's (out, in) would be. Beyond `SMALL_PRODUCT` multiplications it packs the matrix before it multiplies, which
for few rows takes five times as long as the product itself; `product` goes around that.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from crosspool.backends.base import FloatArray

SMALL_PRODUCT = 1_000_000
"""Multiplications up to which OpenBLAS runs kernels that need no packing."""

FEW_ROWS = 4
"""Rows up to which one product a row is quicker than packing."""

MAX_BLOCK_ROWS = 32
MIN_BLOCK_COLUMNS = 128
"""Rows and columns between which blocks of columns, each a small product, are quicker than packing."""


def transposed(matrix: FloatArray) -> FloatArray:
    """A copy of (..., out, in) that lies in memory as (..., in, out)."""
    return np.ascontiguousarray(matrix.swapaxes(-1, -2))


def product(x: FloatArray, matrix: FloatArray) -> FloatArray:
    """(rows, out) from rows (rows, in), or (out,) from one vector (in,), and a matrix (in, out)."""
    if x.size * matrix.shape[1] <= SMALL_PRODUCT or x.ndim == 1:
        result: FloatArray = x.dot(matrix)
        return result
    return _large_product(x, matrix)


def _large_product(x: FloatArray, matrix: FloatArray) -> FloatArray:
    """The same for rows (rows, in), whichever way is quickest."""
    num_rows, num_columns = len(x), matrix.shape[1]
    result = np.empty((num_rows, num_columns), dtype=np.float32)
    block = SMALL_PRODUCT // x.size
    if FEW_ROWS <= num_rows <= MAX_BLOCK_ROWS and block >= MIN_BLOCK_COLUMNS:
        for start in range(0, num_columns, block):
            np.matmul(x, matrix[:, start : start + block], out=result[:, start : start + block])
    elif 1 < num_rows <= FEW_ROWS:
        for row, out in zip(x, result, strict=True):
            row.dot(matrix, out)
    else:
        x.dot(matrix, result)
    return result


def each_released(layers: Iterable[dict[str, FloatArray]]) -> Iterator[dict[str, FloatArray]]:
    """The layers one by one, each emptied once it has been used: packed and plain copies coexist for one layer only."""
    for layer in layers:
        yield layer
        layer.clear()
