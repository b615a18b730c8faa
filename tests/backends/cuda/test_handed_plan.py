"""How a chunk's KV crosses: parts that fit a channel, one number for both ways, epochs of one step."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.prefill_rank.handed_plan import handed_plan
from crosspool.backends.cuda.prefill_rank.handed_slots import earlier_places
from crosspool.scheduler.step import LAYERS_PER_STEP, epoch

pytestmark = pytest.mark.judge


@pytest.mark.parametrize(("num_earlier", "parts"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10)])
def test_earlier_slots_cross_in_as_few_parts_as_fit(num_earlier, parts):
    plan = handed_plan(50, num_earlier, 7, 4, 100)
    assert len(plan.parts) == parts
    assert plan.parts[0][0] == 0
    assert plan.parts[-1][1] == num_earlier
    assert all(0 <= stop - start <= 100 for start, stop in plan.parts)
    assert all(before[1] == after[0] for before, after in zip(plan.parts, plan.parts[1:], strict=False))
    assert plan.num_crossings == 4 * parts + 1
    assert [plan.place(number) for number in range(plan.last)] == [
        (layer, part) for layer in range(4) for part in range(parts)
    ]
    assert plan.base + 1 == epoch(7, 0)
    assert plan.last_epoch < epoch(8, 0)


def test_what_does_not_fit_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="a chunk of 51 tokens, whose channel takes the KV of 50: lower"):
        handed_plan(51, 0, 1, 4, 50)
    most = (LAYERS_PER_STEP - 2) // 4
    handed_plan(1, most, 1, 4, 1)
    with pytest.raises(ValueError, match=r"crosses \d+ times, and a step has epochs for 1023: raise"):
        handed_plan(1, most + 1, 1, 4, 1)


def test_earlier_slots_are_those_of_all_rows_one_after_another():
    rows, positions = earlier_places([3, 0, 2])
    assert rows.tolist() == [0, 0, 0, 2, 2]
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert rows.dtype == positions.dtype == np.int32
    assert all(len(found) == 0 for found in earlier_places([]))
