"""What a step of a split model reads at least, by layout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.full_models import CONFIGS, full_spec  # noqa: E402
from benchmarks.split_model.parts import share_of_slowest, step_floor  # noqa: E402
from benchmarks.split_model.steps import LEAST_STEPS, MOST_STEPS, round_steps  # noqa: E402

pytestmark = pytest.mark.judge


def test_the_slowest_rank_of_a_layout_has_the_largest_share():
    layouts = ("1+1", "1+2", "1+3", "1+1s25", "1+1s60", "1+2s10")
    assert [share_of_slowest(layout) for layout in layouts] == pytest.approx([1, 1 / 2, 1 / 3, 0.75, 0.6, 0.45])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_share_takes_its_part_of_the_ffns_bytes_and_none_of_attentions(name):
    spec = full_spec(name)
    whole, quarter = (step_floor(spec, 4, 4096, share_of_slowest(layout)) for layout in ("1+1", "1+1s25"))
    assert quarter.ffn == pytest.approx(0.75 * whole.ffn)
    assert quarter.attention == whole.attention
    assert step_floor(spec, 8, 4096, 1.0).ffn < 2 * whole.ffn  # some experts are chosen twice
    assert step_floor(spec, 4, 8192, 1.0).attention > whole.attention


def test_rounds_of_long_steps_have_fewer():
    spec = full_spec("qwen3-30b-a3b")
    assert round_steps(step_floor(spec, 1, 4096, 1.0)) > LEAST_STEPS
    assert round_steps(step_floor(spec, 32, 32768, 1.0)) == LEAST_STEPS
    assert round_steps(step_floor(full_spec("deepseek-v2-lite"), 1, 4096, 1.0)) == MOST_STEPS
