"""Steps whose rows are rounded up to those of a pass."""

from __future__ import annotations

import pytest

from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import gpu_kind
from crosspool.simulator.cost import PooledCost, StepWork, decode_work
from crosspool.simulator.passes import UNUSED_FFN_SHARE, PassCost

ROWS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def cost():
    return PooledCost(catalogue_facts("glm-4.7-flash"), gpu_kind("h200"), num_kv=1, num_weights=1, beside_share=0.25)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_passes_of_as_many_rows_as_the_step_has_cost_what_they_did(cost, rows):
    work = decode_work(rows, 1000.0 * rows)
    assert PassCost(cost, ROWS).times(work) == cost.times(work)


def test_a_larger_step_takes_its_passes_one_after_another(cost):
    parts = [cost.times(decode_work(rows, 1000.0 * rows)) for rows in (8, 8, 2)]
    found = PassCost(cost, ROWS).times(decode_work(18, 18_000.0))
    assert found.step_s == pytest.approx(sum(part.step_s for part in parts))
    assert found.beside_s == pytest.approx(sum(part.beside_s for part in parts))


def test_a_chunk_of_a_prompt_is_no_pass(cost):
    work = StepWork(num_tokens=3, kv_tokens=3, pairs=6.0, num_sampled=1)
    assert PassCost(cost, ROWS).times(work) == cost.times(work)


def test_unused_rows_take_attention_like_others_and_of_experts_a_part(cost):
    used, whole = (cost.times(decode_work(rows, 1000.0 * rows)) for rows in (5, 8))
    found = PassCost(cost, ROWS).times(decode_work(5, 5000.0))
    assert found.attention_s == pytest.approx(whole.attention_s)
    assert found.crossing_s == whole.crossing_s
    assert found.ffn_s == pytest.approx(used.ffn_s + UNUSED_FFN_SHARE * (whole.ffn_s - used.ffn_s))
    assert used.beside_s < found.beside_s < whole.beside_s
