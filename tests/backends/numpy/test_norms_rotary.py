"""RMSNorm and rotary embedding against their definitions."""

import numpy as np
import pytest

from crosspool.backends.numpy.norms import RMSNorm
from crosspool.backends.numpy.rotary import FIRST_POSITIONS, STRETCHES_KEPT, RotaryTable, pair_order, rotate
from crosspool.models.rope import inv_freq
from crosspool.models.spec import RopeScaling, RopeSpec


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 4, 16)])
def test_rms_norm_is_its_definition(shape):
    x, weight = random(0, *shape), random(1, *shape[1:])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-2) * weight
    assert RMSNorm(weight, 1e-2)(x) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_vector_and_a_row_have_the_same_norm():
    x, norm = random(4, 1, 64), RMSNorm(random(5, 64), 1e-6)
    assert norm(x[0]) == pytest.approx(norm(x)[0], rel=1e-6)
    expected = norm(x)[0]
    norm(x[0], out=x[0])
    assert x[0] == pytest.approx(expected, rel=1e-6)


def test_turns_may_be_copied_for_every_head():
    table, positions = RotaryTable(RopeSpec(theta=1e4, dim=8)), np.array([3, 700])
    copied = table.turns(positions, 5)
    assert copied.shape == (2, 5, 4)
    assert (copied == table.turns(positions)).all()


def test_a_lone_tokens_turns_are_those_it_has_among_others():
    table = RotaryTable(RopeSpec(theta=1e4, dim=8))
    for num_heads in (3, 5):
        for position in (0, 15, 16, 700, 16 * STRETCHES_KEPT * 5, *range(0, 16 * 2 * STRETCHES_KEPT, 16)):
            lone = table.turns(np.array([position]), num_heads)
            assert lone.shape == (1, num_heads, 4)
            assert (lone == table.turns(np.array([position, 1]), num_heads)[:1]).all()


def test_rms_norm_in_place_on_a_strided_part_leaves_the_rest_alone():
    x = random(2, 3, 20)
    part, rest = x[:, :8], x[:, 8:].copy()
    expected = RMSNorm(random(3, 8), 1e-6)(part.copy())
    RMSNorm(random(3, 8), 1e-6)(part, out=part)
    assert (x[:, :8] == expected).all()
    assert (x[:, 8:] == rest).all()


def turned(x, position, rope):
    """One head (width,) turned by the definition, in float64; pairs as the rope says."""
    half = rope.dim // 2
    pairs = [(2 * idx, 2 * idx + 1) if rope.interleaved else (idx, idx + half) for idx in range(half)]
    result = x.astype(np.float64)
    for (first, second), frequency in zip(pairs, inv_freq(rope), strict=True):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        result[first], result[second] = x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(16, 16), (8, 16), (6, 16)])
def test_rotating_reordered_heads_equals_the_definition(interleaved, dim, width):
    rope = RopeSpec(theta=100.0, dim=dim, interleaved=interleaved)
    order = pair_order(rope, width)
    assert sorted(order.tolist()) == list(range(width))
    x = random(4, 3, 2, width)
    positions = np.array([0, 7, 1500])
    moved = x[..., order].copy()
    rotate(moved[..., :dim], RotaryTable(rope).turns(positions))
    for token, position in enumerate(positions):
        for head in range(2):
            expected = turned(x[token, head], position, rope)[order]
            assert moved[token, head] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_table_grows_and_keeps_its_values():
    table = RotaryTable(RopeSpec(theta=1e4, dim=8))
    before = table.turns(np.array([3]))
    assert table.turns(np.array([5 * FIRST_POSITIONS])).shape == (1, 1, 4)
    assert (table.turns(np.array([3])) == before).all()


def test_yarns_attention_factor_lengthens_the_turned_part():
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, attention_factor=1.25)
    turns = RotaryTable(RopeSpec(theta=1e4, dim=8, scaling=scaling)).turns(np.arange(50))
    assert np.abs(turns) == pytest.approx(np.full(turns.shape, 1.25), rel=1e-6)
