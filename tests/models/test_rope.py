"""Rotary frequencies by hand-computed numbers; the comparison with transformers is in test_config_judge.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from crosspool.models.rope import attention_factor, inv_freq, yarn_mscale
from crosspool.models.spec import RopeScaling, RopeSpec

PLAIN = RopeSpec(theta=10000.0, dim=8)


def scaled(**fields) -> RopeSpec:
    return RopeSpec(theta=10000.0, dim=8, scaling=RopeScaling(**fields))


def test_plain_frequencies():
    np.testing.assert_allclose(inv_freq(PLAIN), [1.0, 0.1, 0.01, 0.001], rtol=1e-15)
    assert inv_freq(PLAIN).dtype == np.float64
    assert attention_factor(PLAIN) == 1.0


def test_linear_divides_all():
    np.testing.assert_allclose(inv_freq(scaled(kind="linear", factor=4.0)), [0.25, 0.025, 0.0025, 0.00025])


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = scaled(kind="llama3", factor=8.0, original_max_positions=1000, low_freq_factor=1.0, high_freq_factor=4.0)
    # Turns over 1000 positions: 159, 15.9, 1.59, 0.159; between 1 and 4 the two are mixed.
    share = (1000 * 0.01 / (2 * math.pi) - 1) / 3
    expected = [1.0, 0.1, 0.01 * (share + (1 - share) / 8), 0.001 / 8]
    np.testing.assert_allclose(inv_freq(rope), expected, rtol=1e-12)


@pytest.mark.parametrize(("truncate", "low", "high"), [(True, 0, 4), (False, 0.696, 3.707)])
def test_yarn_ramps_between_fast_and_slow_pairs(truncate, low, high):
    rope = scaled(
        kind="yarn", factor=40.0, original_max_positions=32000, beta_fast=1024, beta_slow=1, truncate=truncate
    )
    # Pair with n turns over the trained length L: dim * ln(L / (2 pi n)) / (2 ln theta).
    exact = [8 * math.log(32000 / (2 * math.pi * n)) / (2 * math.log(10000)) for n in (1024, 1)]
    assert exact == pytest.approx([0.696, 3.707], abs=1e-3)
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    plain = inv_freq(PLAIN)
    np.testing.assert_allclose(inv_freq(rope), plain * (1 - ramp) + plain / 40 * ramp, rtol=1e-3)


def test_a_yarn_ramp_of_no_width_is_a_step():
    fields = {"original_max_positions": 32000, "beta_fast": 32, "beta_slow": 32, "truncate": False}
    plain = inv_freq(PLAIN)
    # The pair with 32 turns is 2.2: pairs 0 to 2 stay, pair 3 is stretched.
    expected = [*plain[:3], plain[3] / 40]
    np.testing.assert_allclose(inv_freq(scaled(kind="yarn", factor=40.0, **fields)), expected, rtol=1e-12)


def test_yarn_attention_factor_from_each_of_its_sources():
    base = {"kind": "yarn", "factor": 40.0, "original_max_positions": 4096}
    assert attention_factor(scaled(**base)) == pytest.approx(0.1 * math.log(40) + 1)
    assert attention_factor(scaled(**base, mscale=0.707, mscale_all_dim=0.707)) == 1.0
    assert attention_factor(scaled(**base, mscale=1.0, mscale_all_dim=0.5)) == pytest.approx(
        1.36889 / 1.18444, rel=1e-5
    )
    assert attention_factor(scaled(**base, attention_factor=1.5, mscale=0.7, mscale_all_dim=0.1)) == 1.5
    assert yarn_mscale(0.5) == 1.0
