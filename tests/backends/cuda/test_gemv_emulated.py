"""Skinny matrix products, run on the CPU, against float64 arithmetic."""

from __future__ import annotations

import re
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.compile import SOURCES  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv, variant  # noqa: E402
from tests.backends.cuda.decoding import relative_error  # noqa: E402
from tests.backends.cuda.drawn import EXACT, ROUNDED, draw, nan  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.mark.parametrize(
    ("rows", "k", "tokens", "shape"),
    [
        (40, 256, 3, None),
        (33, 72, 1, None),
        (20, 520, 12, (4, 2, 0)),
        (16, 2048, 2, None),
        (48, 1280, 32, (8, 4, 0)),
        (40, 1992, 9, (8, 2, 6)),
        (20, 4096, 3, (8, 2, 14)),
        (20, 2048, 8, (4, 8, 8)),
        (20, 5120, 9, (8, 6, 14)),
        (20, 5120, 1, (8, 2, 18)),
        (20, 192, 3, (1, 6, 0)),
    ],
)
def test_gemv_equals_the_product(rows, k, tokens, shape):
    weight, x, y = draw(rows, k), draw(tokens, k, seed=1), nan(tokens, rows)
    gemv(EmulatedKernels(), weight, x, y, shape=shape)
    assert relative_error(y, x.double() @ weight.double().T) < EXACT


def test_gemv_norms_its_input_and_adds_bias_and_residual():
    weight, x, norm, bias = draw(24, 64), draw(5, 64, seed=1), draw(64, seed=2), draw(24, seed=3)
    residual = draw(5, 24, seed=4).float()
    normed = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6) * norm.double()
    expected = normed @ weight.double().T + bias.double() + residual.double()
    gemv(EmulatedKernels(), weight, x, residual, norm_weight=norm, norm_eps=1e-6, bias=bias, residual=residual)
    assert relative_error(residual, expected) < ROUNDED


@pytest.mark.parametrize("k", [64, 128, 192, 768, 1536, 2048, 3072, 4096, 5120])
@pytest.mark.parametrize("rows", [16, 5120, 150000])
def test_chosen_gemvs_hold_a_row_or_take_it_in_passes(rows, k):
    """With chunks in shared memory or with a norm there is one pass; with a norm there are no such chunks."""
    for norms in (False, True):
        warps, chunks, held = variant(rows, k, norms=norms)
        assert not (held and norms)
        assert warps * (chunks + held) * 32 >= k or not (held or norms)
        assert variant(rows, k, norms=norms, holds=False)[2] == 0


def test_kernels_are_those_that_some_matrix_takes():
    rows, k, flags = (16, 3648, 5120, 40000), range(64, 8193, 64), (False, True)
    chosen = {
        variant(*of, norms=norms, holds=holds, tokens=tokens)
        for *of, norms, holds, tokens in product(rows, k, flags, flags, (1, 8))
    }
    numbers = re.findall(r"^(?:HELD_)?GEMV\((.*), \d+\)$", (SOURCES / "gemv.cu").read_text(), re.MULTILINE)
    assert chosen == {(*map(int, each.split(",")), 0)[:3] for each in numbers}


@pytest.mark.parametrize(
    ("rows", "k", "norms"),
    [(40, 768, True), (5120, 2048, False), (24, 4096, False), (24, 5120, False), (16, 192, False)],
)
def test_a_tokens_product_has_the_same_bits_in_every_batch(rows, k, norms):
    weight, x, residual = draw(rows, k), draw(19, k, seed=1), draw(19, rows, seed=2).float()
    norm = draw(k, seed=3) if norms else None

    def product(tokens):
        y = nan(len(tokens), rows)
        part = x[tokens].contiguous()
        gemv(
            EmulatedKernels(), weight, part, y, norm_weight=norm, norm_eps=1e-6, residual=residual[tokens].contiguous()
        )
        return y

    together = product(list(range(19)))
    for tokens in ([0], [18], [7, 3], [9, 10, 11, 12, 7, 14, 15, 16, 17]):
        assert torch.equal(product(tokens), together[tokens])


def test_grouped_gemv_leaves_what_lies_between_its_outputs_alone():
    weight, x, y = draw(4, 32, 16), draw(3, 4, 32, seed=1)[:, :, :16], nan(3, 4, 48, dtype=torch.bfloat16)
    gemv(EmulatedKernels(), weight, x, y[:, :, :32])
    assert relative_error(y[:, :, :32], torch.einsum("grk,tgk->tgr", weight.double(), x.double())) < ROUNDED
    assert y[:, :, 32:].isnan().all()


def test_gemv_refuses_what_it_cannot_load():
    with pytest.raises(ValueError, match="multiples of 8"):
        gemv(EmulatedKernels(), draw(16, 60), draw(1, 60), nan(1, 16))
    with pytest.raises(ValueError, match="33 tokens"):
        gemv(EmulatedKernels(), draw(16, 64), draw(33, 64), nan(33, 16))
