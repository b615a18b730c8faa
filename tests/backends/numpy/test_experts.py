"""Products with chosen experts equal the definition, in one panel and in several."""

import numpy as np
import pytest

from crosspool.backends.numpy.experts import Experts


@pytest.mark.parametrize(("depth", "width"), [(16, 24), (192, 96), (96, 192)], ids=["whole", "panels", "more panels"])
def test_every_row_is_multiplied_by_its_expert(depth, width):
    rng = np.random.default_rng(depth)
    matrices = rng.standard_normal((5, depth, width)).astype(np.float32)
    rows = rng.standard_normal((4, depth)).astype(np.float32)
    experts, chosen = Experts(matrices), [3, 0, 3, 4]
    exact = matrices.astype(np.float64)
    assert experts.of_one(rows[0], chosen) == pytest.approx(np.stack([rows[0] @ exact[e] for e in chosen]), abs=1e-3)
    expected = np.stack([row @ exact[e] for row, e in zip(rows, chosen, strict=True)])
    assert experts.of_each(rows, chosen) == pytest.approx(expected, abs=1e-3)
    grouped = experts.of_groups(rows, [(1, 0), (2, slice(1, 3)), (4, 3)])
    expected = np.stack([row @ exact[e] for row, e in zip(rows, [1, 2, 2, 4], strict=True)])
    assert grouped == pytest.approx(expected, abs=1e-3)
