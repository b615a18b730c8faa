"""A token's queries and their latents by one kernel, run on the CPU, against the two kernels that batches take."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.absorb import absorb, takes_absorb  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv, variant  # noqa: E402
from tests.backends.cuda.drawn import draw, nan  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge
ROPE, LATENTS, EPS = 64, 512, 1e-6
FROM_LORA = (768, 192, True)
"""k, the queries of a head that go to latents, and whether the input is normed."""
FROM_HIDDEN = (2048, 128, False)


def drawn(shape, heads, other_rows=0):
    k, nope, norms = shape
    weight, key_up = draw(heads * (nope + ROPE) + other_rows, k), draw(heads, LATENTS, nope, seed=1)
    return weight, key_up, draw(1, k + 576, seed=3)[:, :k], draw(k, seed=2) if norms else None


def outputs(weight, key_up):
    return nan(1, len(weight), dtype=torch.bfloat16), nan(1, len(key_up), LATENTS, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "heads", "other_rows"), [(FROM_LORA, 3, 0), (FROM_HIDDEN, 2, 576), (FROM_HIDDEN, 1, 24)]
)
@pytest.mark.parametrize("backwards", [False, True])
def test_queries_and_latents_have_the_bits_of_two_products(shape, heads, other_rows, backwards):
    kernels, (k, nope, norms) = EmulatedKernels(backwards=backwards), shape
    weight, key_up, x, norm = drawn(shape, heads, other_rows)
    served = variant(3648, k, norms=norms)  # of DeepSeek-V2-Lite's rows; with a norm rows do not count
    y, q_latent = outputs(weight, key_up)
    gemv(kernels, weight, x, y, norm_weight=norm, norm_eps=EPS, shape=served)
    queries = y[:, : heads * (nope + ROPE)].unflatten(1, (heads, nope + ROPE))
    gemv(kernels, key_up, queries[:, :, :nope], q_latent)
    y_at_once, q_latent_at_once = outputs(weight, key_up)
    absorb(kernels, weight, key_up, x, y_at_once, q_latent_at_once, norm_weight=norm, norm_eps=EPS)
    assert torch.equal(y_at_once, y)
    assert torch.equal(q_latent_at_once, q_latent)


@pytest.mark.parametrize(("shape", "heads", "other_rows"), [(FROM_LORA, 2, 0), (FROM_HIDDEN, 16, 576)])
def test_one_token_of_known_shapes_is_taken_where_clusters_start(shape, heads, other_rows):
    weight, key_up, _x, _norm = drawn(shape, heads, other_rows)
    kernels, of = EmulatedKernels(), {"head": shape[1] + ROPE, "norms": shape[2]}
    assert takes_absorb(kernels, weight, key_up, 1, **of)
    assert not takes_absorb(kernels, weight, key_up, 2, **of), "the quicker way for one token"
    assert not takes_absorb(EmulatedKernels(is_hopper=False), weight, key_up, 1, **of), "no clusters"
    assert not takes_absorb(kernels, weight, key_up, 1, head=shape[1] + 32, norms=shape[2])
    assert not takes_absorb(kernels, weight, key_up, 1, head=shape[1] + ROPE, norms=not shape[2])
    assert not takes_absorb(kernels, weight[:, :512], key_up, 1, **of)
    assert not takes_absorb(kernels, weight, key_up[:, :256], 1, **of)


def test_a_projection_that_batches_sum_in_another_order_is_left_to_its_own_kernel():
    weight, key_up, _x, _norm = drawn(FROM_HIDDEN, 8, 576)  # half the heads: `gemv` takes fewer rows by eight warps
    assert variant(len(weight), 2048)[0] == 8
    assert not takes_absorb(EmulatedKernels(), weight, key_up, 1, head=128 + ROPE, norms=False)


def test_a_strided_token_is_refused():
    weight, key_up, _x, norm = drawn(FROM_LORA, 1)
    with pytest.raises(ValueError, match="one token of 768"):
        absorb(EmulatedKernels(), weight, key_up, draw(1, 1536)[:, ::2], *outputs(weight, key_up), norm_weight=norm)
