"""How long steps take, and when to look for their end. A device is a clock here."""

from __future__ import annotations

import pytest

from crosspool.backends.cuda.steps.pace import EARLY, LATE, NAP_S, TELL_S, URGENT_NAP_S, Pace


def run(
    pace: Pace, step_s: float, num_steps: int = 8, late_s: float = 2e-5, *, is_followed: bool = False
) -> tuple[float, int]:
    """One run as a host without rows reads it: how late it saw the end, and how many looks that took.

    late_s: how much longer every rest takes. is_followed: the next run lies on the device already.
    """
    now, num_looks = 100.0, 0
    pace._clock = lambda: now
    pace.begin(now)
    for wanted in (num_steps // 2, num_steps):
        pace.look_for(wanted, lambda wanted=wanted: wanted == num_steps and not is_followed)
        assert pace.arrived(0), "a rank looks once before it rests"
        while now < 100.0 + wanted * step_s:
            now += pace.nap_s(now) + late_s
            num_looks += pace.arrived(0)
        num_ended = int((now - 100.0) / step_s + 1e-9)
        if num_ended < num_steps:
            pace.goes_on(now, num_ended)
        else:
            pace.ends(now, num_steps)
    return now - 100.0 - num_steps * step_s, num_looks


def test_a_pace_is_learned_in_few_runs_and_then_costs_few_looks():
    pace = Pace()
    for _ in range(4):
        run(pace, 2.5e-3)
    for _ in range(20):
        late_s, num_looks = run(pace, 2.5e-3)
        assert late_s < 2 * URGENT_NAP_S + 4e-5
        assert num_looks <= 9
    assert pace.step_s == pytest.approx(2.5e-3, rel=0.02)


@pytest.mark.parametrize("step_s", [1.2e-3, 2.4e-3, 7.0e-3])
def test_a_pace_follows_when_a_neighbour_comes_or_goes(step_s):
    pace = Pace()
    run(pace, 2.5e-3)
    late = [run(pace, step_s)[0] for _ in range(24)]
    assert pace.step_s == pytest.approx(step_s, rel=0.06)
    assert late[-1] < 0.06 * 8 * step_s


@pytest.mark.parametrize("late_s", [1e-4, 3e-4])
def test_a_host_whose_rests_are_long_does_not_take_them_for_steps(late_s):
    """A first look that is late by more than a nap says nothing of when the run was over."""
    pace = Pace()
    run(pace, 5e-3, late_s=late_s)
    late = [run(pace, 2.5e-3, late_s=late_s)[0] for _ in range(25)]
    assert max(late[-5:]) < 2 * (URGENT_NAP_S + late_s) + 2e-4


def test_a_host_that_came_late_once_does_not_stay_late():
    pace = Pace()
    run(pace, 2.5e-3)
    run(pace, 2.5e-3, late_s=4e-3)
    late = [run(pace, 2.5e-3)[0] for _ in range(12)]
    assert late[0] < 0.11 * 8 * 2.5e-3
    assert late[-1] < 2 * (URGENT_NAP_S + 2e-5)


def test_where_the_device_goes_on_a_look_is_seldom_for_nothing_and_a_token_seldom_late():
    pace = Pace()
    for _ in range(6):
        run(pace, 2.5e-3, is_followed=True)
    found = [run(pace, 2.5e-3, is_followed=True) for _ in range(40)]
    assert sum(num_looks for _, num_looks in found) / len(found) < 2.6, "two a run, each of which finds something"
    assert max(late_s for late_s, _ in found) < 0.06 * 8 * 2.5e-3


def test_the_first_look_for_an_end_is_a_little_early_where_the_device_then_stands_still():
    pace = Pace()
    pace.look_for(8, lambda: True)
    assert pace.nap_s(100.0) == URGENT_NAP_S, "nothing is known: look at once"
    pace.begin(100.0)
    pace.step_s = 2e-3
    is_urgent = True
    pace.look_for(4, lambda: is_urgent)
    assert pace.nap_s(100.0) == pytest.approx((1 - EARLY) * 8e-3)
    assert pace.nap_s(100.0079999) == URGENT_NAP_S
    is_urgent = False
    assert pace.nap_s(100.0) == pytest.approx((1 + LATE) * 8e-3), "the next run has been handed over since"
    assert pace.nap_s(100.009) == NAP_S


@pytest.mark.parametrize("step_s", [0.0, 1.1e-3, 2.5e-3, 9.0e-3, 30e-3])
def test_steps_are_read_together_for_no_longer_than_a_token_may_be_late(step_s):
    pace = Pace()
    pace.step_s = step_s
    left, parts = 16, []
    while left:
        parts.append(pace.num_at_once(left))
        left -= parts[-1]
    assert sum(parts) == 16
    assert max(parts) - min(parts) <= 1
    assert all(count == 1 or (step_s > 0 and count * step_s <= TELL_S) for count in parts)
    assert step_s in (0.0, 9.0e-3, 30e-3) or min(parts) > 1


def follow(pace: Pace, step_s: float, num_runs: int, num_steps: int = 21, late_s: float = 1e-4) -> tuple[float, float]:
    """Runs one behind another on the device, read in parts: looks a run for nothing, and the latest part's lateness."""
    now, begun, ended_s, idle_looks, latest = 100.0, 100.0, None, 0, 0.0
    pace._clock = lambda: now
    for number in range(num_runs):
        pace.begin(now, ended_s)
        if 0 < (num_ended := int((now - begun) / step_s + 1e-9)) < num_steps:
            pace.goes_on(now, num_ended)
        num_read = 0
        while num_read < num_steps:
            wanted = num_read + pace.num_at_once(num_steps - num_read)
            pace.look_for(wanted, lambda: False)
            pace.arrived(0)
            rested = False
            while now < begun + wanted * step_s:
                idle_looks += rested and number >= num_runs // 2
                now += pace.nap_s(now) + late_s
                pace.arrived(0)
                rested = True
            latest = max(latest, now - begun - wanted * step_s) if number >= num_runs // 2 else 0.0
            num_read = min(num_steps, int((now - begun) / step_s + 1e-9))
            if num_read < num_steps:
                pace.goes_on(now, num_read)
            else:
                ended_s = pace.ends(now, num_steps)
        begun += num_steps * step_s
    return idle_looks / (num_runs - num_runs // 2), latest


@pytest.mark.parametrize(("step_s", "most"), [(1.1e-3, 0.3), (2.5e-3, 0.3), (2.6e-3, 0.3), (20e-3, 0.7)])
def test_runs_that_follow_each_other_are_kept_pace_with(step_s, most):
    """Where the next run begins without the host, its beginning is not seen; what is thought of it must not drift."""
    pace = Pace()
    idle_looks, latest_s = follow(pace, step_s, 400)
    assert idle_looks < most
    assert latest_s < max(1.5 * step_s, 4e-3)
    assert pace.step_s == pytest.approx(step_s, rel=0.01)


def test_runs_that_are_read_with_one_look_are_kept_pace_with():
    """Where the device is when its host comes to the next run tells how late it has come to look at the last."""
    _, latest_s = follow(Pace(), 1.1e-3, 400, num_steps=16)
    assert latest_s < 3 * 1.1e-3


def test_runs_that_follow_each_other_are_kept_pace_with_when_a_neighbour_comes_and_goes():
    pace = Pace()
    for step_s in (2.5e-3, 3.7e-3, 2.5e-3):
        idle_looks, latest_s = follow(pace, step_s, 60)
        assert idle_looks < 0.6
        assert latest_s < 1.5 * step_s


def test_a_run_whose_beginning_nobody_could_see_teaches_no_quick_steps():
    """Its device may have ended all of it when its host comes to look for the first time."""
    now, pace = 100.0, Pace()
    pace._clock = lambda: now
    pace.step_s = 4.4e-3
    pace.begin(now, is_ahead=True)
    pace.look_for(18, lambda: False)
    pace.arrived(0)
    now += 1e-3
    pace.arrived(0)
    pace.ends(now, 18)
    assert pace.step_s == pytest.approx(4.4e-3, rel=0.01)


def test_a_pace_that_was_far_off_is_found_again_in_a_few_runs():
    pace = Pace()
    pace.step_s = 5e-5
    _, latest_s = follow(pace, 4.4e-3, 16)
    assert pace.step_s == pytest.approx(4.4e-3, rel=0.02)
    assert latest_s < 1.5 * 4.4e-3
