"""Products with matrices in panels equal the definition, whatever their shapes."""

import numpy as np
import pytest

from crosspool.backends.numpy.matrices import WHOLE_ELEMENTS, columns, panels, product


@pytest.mark.parametrize(
    ("num_rows", "depth", "num_columns", "num_panels"),
    [(3, 16, 24, 1), (2, 192, 384, 12), (5, 192, 336, 7), (40, 192, 176, 11), (3, 192, 125, 1), (200, 192, 2048, 64)],
    ids=["small", "panels", "of 48 columns", "of 16 columns", "no panel divides it", "many rows"],
)
def test_a_product_is_its_definition(num_rows, depth, num_columns, num_panels):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, depth)).astype(np.float32)
    plain = rng.standard_normal((num_columns, depth)).astype(np.float32).T
    matrix = panels(plain)
    assert (depth * num_columns < WHOLE_ELEMENTS) <= (num_panels == 1)
    assert matrix.shape == (num_panels, depth, num_columns // num_panels)
    assert matrix.flags.c_contiguous
    expected = x.astype(np.float64) @ plain
    result = product(x, matrix)
    assert result.dtype == np.float32
    assert result == pytest.approx(expected, abs=1e-3)
    assert product(x[0], matrix) == pytest.approx(expected[0], abs=1e-3)


def test_several_matrices_are_cut_alike():
    rng = np.random.default_rng(1)
    experts = rng.standard_normal((3, 192, 96)).astype(np.float32)
    packed = panels(experts)
    assert packed.shape == (3, 3, 192, 32)
    for expert, matrix in zip(experts, packed, strict=True):
        assert (matrix == panels(expert)).all()


@pytest.mark.parametrize("num_columns", [24, 2048])
def test_columns_are_those_of_the_matrix(num_columns):
    plain = np.random.default_rng(2).standard_normal((16, num_columns)).astype(np.float32)
    numbers = np.array([3, num_columns - 1, 3, 0])
    assert (columns(panels(plain), numbers) == plain.T[numbers]).all()
    lone = columns(panels(plain), numbers[1:2])
    assert (lone == plain.T[numbers[1:2]]).all()
    assert lone.flags.c_contiguous
    assert lone.flags.owndata, "the residual stream is written to"
