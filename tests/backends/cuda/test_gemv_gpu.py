"""Skinny products on a GPU: a token's sums have one order, whatever shape its batch chooses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv  # noqa: E402
from tests.backends.cuda.decoding import relative_error  # noqa: E402
from tests.backends.cuda.drawn import EXACT, draw  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "k"), [(2048, 5120), (2048, 2048), (5120, 2048), (3648, 2048), (512, 192), (512, 128)]
)
def test_a_tokens_product_has_the_same_bits_in_every_batch(rows, k):
    kernels = DeviceKernels(torch.device("cuda"))
    weight, x = draw(rows, k).cuda(), draw(8, k, seed=1).cuda()

    def product(tokens):
        y = torch.full((len(tokens), rows), float("nan"), device="cuda")
        gemv(kernels, weight, x[tokens].contiguous(), y, overlap=False)
        return y

    together = product(list(range(8)))
    assert relative_error(together.cpu(), x.cpu().double() @ weight.cpu().double().T) < EXACT
    for row in range(8):
        assert torch.equal(product([row])[0], together[row])
