"""The schedule that two lanes' steps are compared with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.split_model.lanes_at_work import Busy, scheduled_ms, window_means_ms

pytestmark = pytest.mark.judge

DEEP = Busy(attention=1.3, ffn=1.5, tail=0.1, layers=48)
SHALLOW = Busy(attention=0.8, ffn=1.3, tail=0.1, layers=27)


def test_a_lone_lane_takes_its_own_time_whatever_the_crossings_take():
    for lone_ms in (2.8, 3.0):
        assert scheduled_ms([DEEP.stages(lone_ms)]) == pytest.approx([lone_ms])


def test_no_crossing_takes_less_than_nothing():
    assert DEEP.stages(2.0).crossing_s == 0


def test_two_equal_lanes_keep_the_busier_pool_at_work_but_for_the_tail():
    alike = scheduled_ms([DEEP.stages(3.0)] * 2)
    assert alike[0] == pytest.approx(alike[1], rel=1e-3)
    assert 2 * DEEP.ffn <= alike[0] <= 2 * (DEEP.ffn + DEEP.tail)


def test_a_share_beside_attention_is_part_of_that_gpus_work():
    shared = Busy(attention=1.3, ffn=1.5, tail=0.1, layers=48, beside=0.6)
    assert shared.bottleneck == pytest.approx(1.9)
    assert scheduled_ms([shared.stages(3.0)]) == pytest.approx([3.0])
    assert 2 * 1.9 - 1e-9 <= scheduled_ms([shared.stages(3.0)] * 2)[0] <= 2 * 2.0


def test_a_shallow_model_beside_a_deep_one_keeps_its_own_pace():
    deep, shallow = scheduled_ms([DEEP.stages(3.0), SHALLOW.stages(2.2)])
    assert shallow < 0.7 * deep
    assert deep > 3.0
    assert shallow > 2.2


def test_windows_show_a_second_in_which_steps_took_longer():
    moments = [*range(0, 1000, 2), *range(1000, 2000, 4), *range(2000, 4001, 2)]
    assert window_means_ms(moments, 1000.0) == pytest.approx([2.0, 4.0, 2.0])
