"""Budgets from half of a published trace cover the other half as often as they say, where the load does not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planning.traces import FILES, held_out_halves

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


@pytest.mark.parametrize("label", ["Azure 2023 code", "Mooncake conversation"])
def test_the_other_half_is_covered(label):
    for half in held_out_halves(TRACES, FILES[label], seed=7):
        assert half.is_inside, half
        assert half.effective_samples < 500


def test_a_change_of_load_is_seen_as_a_miss():
    """Azure's conversations are longer in the first half: its mean demand is 18 % higher, at the same rate."""
    first, second = held_out_halves(TRACES, FILES["Azure 2023 conversation"], seed=7)
    assert first.rates_rps[0] == pytest.approx(first.rates_rps[1], rel=0.02)
    assert first.mean_bytes[0] > 1.15 * first.mean_bytes[1]
    assert first.over < first.low
    assert second.over > second.high
