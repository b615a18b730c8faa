"""Products of few and many rows equal the definition, whichever way they take."""

import numpy as np
import pytest

from crosspool.backends.numpy.matrices import SMALL_PRODUCT, product, transposed


@pytest.mark.parametrize(
    ("num_rows", "depth", "num_columns"),
    [(3, 16, 24), (2, 600, 1024), (4, 900, 700), (5, 192, 2048), (16, 192, 2048), (40, 192, 512), (1, 1024, 1100)],
    ids=["small", "row by row", "row by row, 4", "blocks", "blocks of 16 rows", "many rows", "one row"],
)
def test_every_way_of_a_product_is_its_definition(num_rows, depth, num_columns):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, depth)).astype(np.float32)
    matrix = transposed(rng.standard_normal((num_columns, depth)).astype(np.float32))
    assert matrix.flags.c_contiguous
    assert (x.size * num_columns > SMALL_PRODUCT) == (num_rows != 3)
    result = product(x, matrix)
    assert result.dtype == np.float32
    assert result == pytest.approx(x.astype(np.float64) @ matrix, abs=1e-3)
    assert product(x[0], matrix) == pytest.approx(result[0], abs=1e-3)
