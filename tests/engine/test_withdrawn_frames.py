"""Frames that a lowered budget leaves unused come back as soon as the budget counts on them."""

import pytest

from crosspool.engine.claims import Claim
from crosspool.engine.forecast import Reserve
from crosspool.engine.kv_rank_pages import KVRankPages
from crosspool.kv_pool.limits import PoolLimits
from tests.support.core_drive import a_model


@pytest.mark.parametrize("change", ["a model goes", "a model comes"])
def test_models_that_come_and_go_leave_the_budget_no_frame_that_the_pool_lacks(change):
    pages = KVRankPages("kv0", 21, 64, Reserve(), maps_frames=True)
    assert pages.ahead is not None
    pages.add_model(a_model("p"))
    pages.add_model(a_model("q"))
    pages.set_limits(PoolLimits(budget=15))
    pages.ahead.hints({"p": 0, "q": 0}, 0.0)
    assert pages.pool.num_withdrawn == 5

    def hold(sequence_id: int, num_frames: int, expected: int) -> None:
        assert pages.budget.grow(sequence_id, num_frames, expected)
        assert pages.pool.allocate("p", num_frames) is not None, "the budget granted what the pool does not have"

    for sequence_id, most in ((1, 14), (2, 4)):
        pages.budget.open(sequence_id, Claim(0, 4, most, "p"))
        hold(sequence_id, 4, 4)
    hold(1, 4, 14)  # it will be longer than was expected, and both together more than the limits allow
    if change == "a model goes":
        pages.remove_model("q")
    else:
        pages.add_model(a_model("r"))
    assert pages.budget.is_settling
    hold(1, 6, 14)
