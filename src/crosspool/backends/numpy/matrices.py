"""How matrices lie in memory: (in, out), so that `np.dot(x, matrix)` runs at full speed for one row and for a few.

For 2 to 16 rows OpenBLAS takes up to five times as long when the right operand is a transposed view, which is what a
checkpoint's (out, in) would be.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from crosspool.backends.base import FloatArray


def transposed(matrix: FloatArray) -> FloatArray:
    """A copy of (..., out, in) that lies in memory as (..., in, out)."""
    return np.ascontiguousarray(matrix.swapaxes(-1, -2))


def each_released(layers: Iterable[dict[str, FloatArray]]) -> Iterator[dict[str, FloatArray]]:
    """The layers one by one, each emptied once it has been used: packed and plain copies coexist for one layer only."""
    for layer in layers:
        yield layer
        layer.clear()
