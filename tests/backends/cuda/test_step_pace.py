"""How long a host may look away from a single step. A device is a clock here."""

from __future__ import annotations

from crosspool.backends.cuda.steps.pace import EASY_NAP_S, NUM_KEPT, RESTED, SHORTEST_NAP_S, StepPace

LOOK_S = 2e-6


class Host:
    def __init__(self):
        self.now_s, self.slept_s, self.num_looks = 100.0, 0.0, 0
        self.pace = StepPace(lambda: self.now_s)
        self.is_followed = False

    def step(self, step_s):
        """Runs one step; how late its end was seen."""
        begun_s = self.now_s
        self.pace.begin(begun_s, lambda: self.is_followed)
        self.slept_s = 0.0
        while self.pace.arrived(0) and self.now_s < begun_s + step_s:
            nap_s = self.pace.nap_s(self.now_s)
            self.slept_s += nap_s
            self.now_s += nap_s + LOOK_S
            self.num_looks += 1
        self.pace.ends(self.now_s)
        return self.now_s - begun_s - step_s


def test_a_host_rests_for_most_of_a_step_and_sees_its_end_at_once():
    host = Host()
    for _ in range(NUM_KEPT):
        assert host.step(2.5e-3) < 2 * LOOK_S
        assert host.slept_s == 0.0, "nothing is known yet"
    for number in range(100):
        step_s = 2.5e-3 * (1 + 0.05 * (number % 3 - 1))
        assert host.step(step_s) < 2 * LOOK_S
        assert host.slept_s > 0.84 * step_s * RESTED


def test_steps_that_a_neighbour_made_longer_do_not_make_a_host_late():
    """One step that took long says nothing; when all get quicker, one end is seen late, and none after it."""
    host = Host()
    for step_s in (*[3e-3] * NUM_KEPT, 40e-3, 3e-3, 40e-3, 3e-3):
        assert host.step(step_s) < 2 * LOOK_S
    for _ in range(2 * NUM_KEPT):
        host.step(9e-3)
    assert host.step(2e-3) > 1e-3
    assert all(host.step(2e-3) < 2 * LOOK_S for _ in range(3 * NUM_KEPT))


def test_short_rests_are_not_worth_it():
    host = Host()
    for _ in range(NUM_KEPT + 3):
        host.step(SHORTEST_NAP_S)
    assert host.slept_s == 0.0


def test_an_end_that_has_a_step_behind_it_may_be_seen_a_little_late():
    host = Host()
    host.is_followed = True
    for _ in range(NUM_KEPT):
        host.step(2.5e-3)
    host.num_looks = 0
    late = [host.step(2.5e-3) for _ in range(20)]
    assert max(late) < EASY_NAP_S + 2 * LOOK_S
    assert host.num_looks < 20 * 4
