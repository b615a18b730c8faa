"""How matrices lie in memory, in panels of columns, and how rows are multiplied by them at full speed.

OpenBLAS reads a matrix (in, out) by four of its rows at once. Where a row is a kilobyte or two long, the processor sees
four short streams in place of a long one, and fetches little ahead: a matrix from beyond the caches took two to four
times as long. Narrow panels are read nearly from one end to the other. They also keep every product of few rows small
enough for the kernels that need no packing.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from crosspool.backends.base import FloatArray

PANEL_WIDTHS = (32, 48, 64, 16)
"""Columns of a panel, best first; they divide those of the matrix."""

WHOLE_ELEMENTS = 1 << 14
"""Smaller matrices are one panel, as are those that no panel divides."""


def transposed(matrix: FloatArray) -> FloatArray:
    """A copy of (..., out, in) that lies in memory as (..., in, out)."""
    return np.ascontiguousarray(matrix.swapaxes(-1, -2))


def panels(matrix: FloatArray) -> FloatArray:
    """A copy of (..., in, out) that lies as (..., panels, in, width): column c is `[c // width, :, c % width]`."""
    *lead, depth, num_columns = matrix.shape
    widths = PANEL_WIDTHS if depth * num_columns >= WHOLE_ELEMENTS else ()
    width = next((width for width in widths if num_columns % width == 0), num_columns)
    return np.ascontiguousarray(matrix.reshape(*lead, depth, num_columns // width, width).swapaxes(-3, -2))


def product(x: FloatArray, matrix: FloatArray) -> FloatArray:
    """(rows, out) from rows (rows, in), or (out,) from one vector (in,), and the panels of a matrix."""
    num_panels, _, width = matrix.shape
    if num_panels == 1:
        whole: FloatArray = x.dot(matrix[0])
        return whole
    if x.ndim == 1:
        one: FloatArray = np.matmul(x, matrix).reshape(-1)
        return one
    by_row = np.empty((len(x), num_panels, width), dtype=np.float32)
    np.matmul(x, matrix, by_row.swapaxes(0, 1))
    return by_row.reshape(len(x), -1)


def columns(matrix: FloatArray, numbers: np.ndarray) -> FloatArray:
    """(len(numbers), in): those columns of a matrix in panels, a new array."""
    width = matrix.shape[-1]
    if len(numbers) == 1:
        panel, column = divmod(numbers.item(), width)
        return matrix[None, panel, :, column].copy()
    found: FloatArray = matrix[numbers // width, :, numbers % width]
    return found


def each_released(layers: Iterable[dict[str, FloatArray]]) -> Iterator[dict[str, FloatArray]]:
    """The layers one by one, each emptied once it has been used: packed and plain copies coexist for one layer only."""
    for layer in layers:
        yield layer
        layer.clear()
