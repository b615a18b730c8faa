"""The whole pool under random operations: five models of different pages, both backings, failures of the driver.

At every step no page has two owners, budget, floors and ceilings hold, and somebody can go on; at the end everything
has ended and every page is back.
"""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosspool.kv_pool.backing.driver import DriverError
from crosspool.kv_pool.backing.vmm import VmmBacking
from tests.support.awaited import until
from tests.support.fake_vmm import FakeVmmDriver, Status
from tests.support.pool_run import random_run, unlucky_driver
from tests.support.pool_world import FRAME_BYTES, WIDTHS, PoolWorld, limits_of

NUM_FRAMES = 60
models = st.sampled_from(sorted(WIDTHS))
fractions = st.floats(0.0, 1.0)


class PoolMachine(RuleBasedStateMachine):
    """Sequences are admitted, grow, finish and are aborted; limits change; models are evicted and replaced."""

    kind = "arena"
    policy = "reserve"
    failing: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.0
        self.random = random.Random(0)
        self.world = PoolWorld(self.kind, NUM_FRAMES, FakeVmmDriver(FRAME_BYTES, self.fails), self.policy)
        self.next_step = 1

    def fails(self, name: str) -> Status:
        if name not in self.failing or self.random.random() >= self.chance:
            return Status.SUCCESS
        return Status.OUT_OF_MEMORY if name == "cuMemMap" else Status.UNKNOWN

    @rule(model=models, held=st.integers(1, 3), more=st.integers(0, 6), optimism=fractions)
    def admit(self, model, held, more, optimism):
        free = self.world.pool.num_free
        if self.world.admit(model, held, more, optimism) is None:
            assert self.world.pool.num_free == free

    def some(self, data, wanted=lambda sequence_id: True) -> int | None:
        ids = [sequence_id for sequence_id in self.world.live if wanted(sequence_id)]
        return data.draw(st.sampled_from(ids)) if ids else None

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), times=st.integers(1, 4))
    def grow(self, data, times):
        sequence_id = self.some(data, self.world.can_grow)
        for _ in range(times):
            if sequence_id is not None and sequence_id in self.world.live and self.world.can_grow(sequence_id):
                self.world.grow(sequence_id)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def finish_or_abort(self, data):
        sequence_id = self.some(data, lambda key: not self.world.live[key].has_ended)
        if sequence_id is not None:
            self.world.end(sequence_id)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def begin_step(self, data):
        alive = [key for key, sequence in self.world.live.items() if not sequence.has_ended]
        if alive:
            self.world.begin_step(self.next_step, set(data.draw(st.lists(st.sampled_from(alive), min_size=1))))
            self.next_step += 1

    @precondition(lambda self: self.world.steps)
    @rule(data=st.data())
    def end_step(self, data):
        self.world.end_step(data.draw(st.sampled_from(sorted(self.world.steps))))

    @rule(model=models, budget=fractions, floor=st.floats(0.0, 0.3), ceiling=st.none() | fractions)
    def change_limits(self, model, budget, floor, ceiling):
        self.world.set_limits(limits_of(self.world, budget, model, floor, ceiling))

    @rule(model=models)
    def evict(self, model):
        self.world.evict(model)

    @rule(model=models)
    def replace(self, model):
        if not any(sequence.model == model for sequence in self.world.live.values()):
            self.world.replace_model(model)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def look_ahead(self, seconds):
        self.world.look_ahead(seconds)

    @precondition(lambda self: self.failing)
    @rule(chance=st.sampled_from([0.0, 0.0, 0.1, 0.5]), seed=st.integers(0, 1000))
    def change_luck(self, chance, seed):
        self.chance, self.random = chance, random.Random(seed)

    @invariant()
    def everything_holds(self):
        self.world.check()

    def teardown(self):
        self.chance = 0.0
        self.world.finish_all()
        if not self.failing:
            assert self.world.num_failed == 0
        self.world.look_ahead(100.0)
        self.world.look_ahead(100.0)
        pool = self.world.pool
        assert pool.num_loose + pool.num_withdrawn == pool.budget, "idle pages were not taken back"
        self.world.close()


class ArenaForecast(PoolMachine):
    policy = "forecast"


class Vmm(PoolMachine):
    kind = "vmm"


class VmmForecast(Vmm):
    policy = "forecast"


class VmmFailures(Vmm):
    """Maps fail, memory runs out, access cannot be set, unmaps fail."""

    policy = "forecast"
    failing = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")


TestArena = PoolMachine.TestCase
TestArenaForecast = ArenaForecast.TestCase
TestVmm = Vmm.TestCase
TestVmmForecast = VmmForecast.TestCase
TestVmmFailures = VmmFailures.TestCase
for case in (TestArena, TestArenaForecast, TestVmm, TestVmmForecast, TestVmmFailures):
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
del case


def settled(world: PoolWorld) -> None:
    """Everything has ended: idle pages are taken back, and nothing of the driver's is left."""
    world.look_ahead(100.0)
    world.look_ahead(100.0)
    world.look_ahead(100.0)
    assert world.pool.num_loose + world.pool.num_withdrawn == world.pool.budget, "idle pages were not taken back"
    counts = world.backing.counts()
    assert counts.mapped_frames == 0
    unused = world.pool.budget - world.budget.limits.budget
    assert world.pool.num_withdrawn == unused
    if isinstance(world.backing, VmmBacking):
        assert counts.absent_frames == unused, "memory that the limits leave unused is the driver's"
        assert len(world.driver.contents) == world.pool.num_frames - unused
    world.close()


@pytest.mark.parametrize("policy", ["reserve", "forecast"])
@pytest.mark.parametrize("kind", ["arena", "vmm"])
def test_thousands_of_random_operations(kind, policy):
    world = PoolWorld(kind, NUM_FRAMES + 1, policy=policy)
    random_run(world, random.Random(6), 4_000)
    assert world.num_failed == 0
    settled(world)


def test_thousands_of_random_operations_with_a_driver_that_fails_a_tenth_of_the_time():
    rng = random.Random(7)
    world = PoolWorld("vmm", NUM_FRAMES + 1, unlucky_driver(rng, 0.1), "forecast")
    random_run(world, rng, 4_000)
    assert world.backing.counts().failures > 100
    settled(world)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["reserve", "forecast"])
@pytest.mark.parametrize(("kind", "chance"), [("arena", 0.0), ("vmm", 0.0), ("vmm", 0.05)])
def test_a_million_random_operations_without_a_leak(kind, policy, chance):
    rng = random.Random(8)
    world = PoolWorld(kind, NUM_FRAMES + 1, unlucky_driver(rng, chance), policy)
    random_run(world, rng, 1_000_000, check_every=10)
    world.look_ahead(100.0)
    assert len(world.driver.reserved) <= len(WIDTHS) + 1, "ranges of removed models were not given back"
    settled(world)


@pytest.mark.parametrize("policy", ["reserve", "forecast"])
def test_nothing_on_the_decode_path_waits_for_the_driver_unless_the_pool_is_empty(policy):
    """Mapping runs ahead after every turn, as in the engine; sequences that decode find their pages mapped."""
    rng = random.Random(9)
    world = PoolWorld("vmm", 400, policy=policy)
    num_grown = 0
    for turn in range(3_000):
        if turn % 5 == 0:
            world.admit(rng.choice(sorted(WIDTHS)), rng.randint(1, 3), rng.randint(1, 8), 0.5)
        world.look_ahead(rng.choice((0.001, 0.001, 0.5)))
        for sequence_id in list(world.live):  # a decode step: every sequence may cross into a new page
            if not world.can_grow(sequence_id):
                world.end(sequence_id)
            elif rng.random() < 0.3:
                num_grown += world.grow(sequence_id)
        world.check()
    world.finish_all()
    counts = world.backing.counts()
    assert num_grown > 1_000
    assert counts.decode_waits == 0, counts
    assert counts.maps > 500
    settled(world)


def test_slow_access_setting_delays_nobody_whose_page_was_expected():
    """With a real thread: the step that needs an expected page takes no longer than one whose page is mapped."""
    driver = FakeVmmDriver(FRAME_BYTES)
    backing = VmmBacking(driver, 33, FRAME_BYTES)
    try:
        backing.add_model("a", 1)
        driver.slow_s["cuMemSetAccess"] = 0.02
        backing.expect("a", [(frame,) for frame in range(1, 11)])
        until(lambda: backing.counts().maps == 10, backing.counts)
        driver.slow_s["cuMemSetAccess"] = 60.0
        started_s = time.monotonic()
        backing.spots("a", 1, [(frame,) for frame in range(1, 11)], is_decode=True)
        assert time.monotonic() - started_s < 10.0
        driver.slow_s["cuMemSetAccess"] = 0.02
        assert backing.counts().decode_waits == 0
        backing.spots("a", 2, [(20,)], is_decode=True)
        assert backing.counts().decode_waits == 1
        assert 0.02 <= backing.counts().longest_wait_s < 5.0
    finally:
        driver.slow_s.clear()
        backing.close()
    assert not driver.misuse
    assert not driver.contents


def test_memory_that_cannot_be_created_is_told_with_how_far_it_went_and_given_back():
    driver = FakeVmmDriver(FRAME_BYTES, max_frames=20)
    with pytest.raises(DriverError, match=r"cuMemCreate failed: OUT_OF_MEMORY after 20 of 30 frames of 65536 bytes"):
        VmmBacking(driver, 30, FRAME_BYTES)
    assert not driver.contents


def test_a_page_that_cannot_be_mapped_fails_its_step_alone():
    driver = FakeVmmDriver(FRAME_BYTES)
    backing = VmmBacking(driver, 33, FRAME_BYTES)
    try:
        backing.add_model("a", 1)
        backing.spots("a", 1, [(1,)], is_decode=False)
        driver.fails = lambda name: Status.OUT_OF_MEMORY if name == "cuMemMap" else Status.SUCCESS
        with pytest.raises(DriverError, match="no spot for a page of a: cuMemMap failed: OUT_OF_MEMORY"):
            backing.spots("a", 2, [(2,)], is_decode=False)
        assert backing.spots("a", 1, [(1,)], is_decode=True) == ((1,),)
        driver.fails = lambda name: Status.SUCCESS
        backing.forget([2])
        assert len(backing.spots("a", 3, [(2,)], is_decode=False)) == 1
    finally:
        backing.close()
