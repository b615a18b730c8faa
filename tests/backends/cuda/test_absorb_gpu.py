"""A token's queries and their latents by one kernel on a GPU: the bits of the two kernels that batches take."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.backends.cuda.kernels.absorb import absorb, takes_absorb  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv  # noqa: E402
from tests.backends.cuda.decoding import relative_error  # noqa: E402
from tests.backends.cuda.drawn import ROUNDED, draw  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "k", "nope", "other_rows", "norms"), [(20, 768, 192, 0, True), (16, 2048, 128, 576, False)]
)
def test_queries_and_latents_have_the_bits_of_two_products(heads, k, nope, other_rows, norms):
    kernels, head = DeviceKernels(torch.device("cuda")), nope + 64
    rows = heads * head + other_rows
    weight, key_up, x = draw(rows, k).cuda(), draw(heads, 512, nope, seed=1).cuda(), draw(1, k, seed=3).cuda()
    norm = draw(k, seed=2).cuda() if norms else None
    assert takes_absorb(kernels, weight, key_up, 1, head=head, norms=norms)

    def by(product):
        y = torch.full((1, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        q_latent = torch.full((1, heads, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
        product(y, q_latent)
        return y, q_latent

    def two(y, q_latent):
        gemv(kernels, weight, x, y, norm_weight=norm, norm_eps=1e-6, overlap=False)
        gemv(kernels, key_up, y[:, : heads * head].unflatten(1, (heads, head))[:, :, :nope], q_latent)

    def one(y, q_latent):
        absorb(kernels, weight, key_up, x, y, q_latent, norm_weight=norm, norm_eps=1e-6)

    y, q_latent = by(two)
    queries = y[0, : heads * head].view(heads, head)[:, :nope].double()
    assert relative_error(q_latent[0], torch.einsum("hln,hn->hl", key_up.double(), queries)) < ROUNDED
    for _ in range(20):
        y_at_once, q_latent_at_once = by(one)
        assert torch.equal(y_at_once, y)
        assert torch.equal(q_latent_at_once, q_latent)
