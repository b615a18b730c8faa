"""A KV pool whole: pool, budget, limits, mapping ahead and a backing, with sequences that come, grow and go.

Every slot of memory that a sequence owns carries its stamp, so that a page with two owners, a wrong spot or a frame
that lost its contents shows when the sequence reads it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim
from crosspool.kv_pool.ahead import AheadOfNeed, MemoryHint
from crosspool.kv_pool.backing.base import FrameRange
from crosspool.kv_pool.backing.driver import DriverError
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.kv_pool.limits import PoolLimits, PoolSize, check_limits
from crosspool.kv_pool.pool import KVPool, Page
from crosspool.units import KiB, ceil_div
from tests.support.arena_backing import ArenaBacking, Backing
from tests.support.fake_vmm import FakeVmmDriver, Status

FRAME_BYTES = 64 * KiB
WIDTHS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 7}
"""Five models and the frames of their pages."""


@dataclass(slots=True)
class Live:
    """One sequence: its pages, where they are, and the most it may have. has_ended: a step still runs over it."""

    model: str
    most: int
    pages: list[Page] = field(default_factory=list)
    spots: list[Page] = field(default_factory=list)
    has_ended: bool = False


class PoolWorld:
    """`kind` is the backing; `driver` stands in for CUDA's under vmm."""

    def __init__(
        self, kind: str, num_frames: int, driver: FakeVmmDriver | None = None, policy: str = "reserve"
    ) -> None:
        self.policy = policy
        self.driver = driver or FakeVmmDriver(FRAME_BYTES)
        self.pool = KVPool(num_frames)
        self.budget = PageBudget(self.pool.budget)
        self.ahead = AheadOfNeed(self.pool, idle_s=2.0)
        self.arena: dict[int, Any] = {}
        self.backing: Backing = (
            ArenaBacking(0, num_frames, FRAME_BYTES)
            if kind == "arena"
            else VmmBacking(self.driver, num_frames, FRAME_BYTES, has_thread=False, clock=lambda: self.time_s())
        )
        self.ranges: dict[str, FrameRange] = {}
        self.live: dict[int, Live] = {}
        self.steps: dict[int, set[int]] = {}  # running steps and the sequences they are of
        self.num_failed = 0
        self.num_stalls = 0
        self.now = 0.0
        self._next_id = 1
        for model, width in WIDTHS.items():
            self.pool.add_model(model, width)
            self._add_range(model)

    def time_s(self) -> float:
        """A clock that goes on a little with every look, as a driver's failures need."""
        self.now += 0.01
        return self.now

    def admit(self, model: str, held: int, more: int, optimism: float = 1.0) -> int | None:
        """A sequence with `held` pages that may grow by `more`; None if it is not admitted."""
        width = WIDTHS[model]
        expected = held + (more if self.policy == "reserve" else int(more * optimism))
        claim = Claim(held * width, expected * width, (held + more) * width, model)
        if not self.budget.admits(claim):
            return None
        sequence_id = self._next_id
        self._next_id += 1
        self.budget.open(sequence_id, claim)
        self.live[sequence_id] = Live(model, held + more)
        self._extend(sequence_id, held, is_decode=False)
        return sequence_id

    def grow(self, sequence_id: int) -> bool:
        """One page more; False if it has to wait."""
        sequence = self.live[sequence_id]
        claim = self.budget.claims[sequence_id]
        if not self.budget.grow(sequence_id, WIDTHS[sequence.model], claim.expected):
            assert self.policy == "forecast", "a reserved page was not granted"
            self.num_stalls += 1
            return False
        self._extend(sequence_id, 1, is_decode=True)
        return True

    def can_grow(self, sequence_id: int) -> bool:
        sequence = self.live[sequence_id]
        return not sequence.has_ended and len(sequence.pages) < sequence.most

    def end(self, sequence_id: int) -> None:
        """Finished or aborted: its pages go when no running step is of it."""
        sequence = self.live[sequence_id]
        sequence.has_ended = True
        if any(sequence_id in members for members in self.steps.values()):
            self.budget.stop_growing(sequence_id)
        else:
            self._release(sequence_id)

    def begin_step(self, step: int, members: set[int]) -> None:
        self.backing.begin_step(step, members)
        self.steps[step] = members

    def end_step(self, step: int) -> None:
        members = self.steps.pop(step)
        for sequence_id in members:
            self._read(sequence_id)  # the step touches everything that its sequences have
        self.backing.end_step(step)
        for sequence_id in members:
            if self.live[sequence_id].has_ended and not any(sequence_id in others for others in self.steps.values()):
                self._release(sequence_id)

    def set_limits(self, limits: PoolLimits) -> bool:
        """Change the limits, if they can be held; nothing live is touched."""
        size = PoolSize(num_frames=self.pool.budget, frame_bytes=FRAME_BYTES, frames_per_page=WIDTHS)
        try:
            check_limits(limits, size)
        except ValueError:
            return False
        held = {key: tuple(sequence.pages) for key, sequence in self.live.items()}
        self._hold_to(limits)
        assert held == {key: tuple(sequence.pages) for key, sequence in self.live.items()}
        return True

    def _hold_to(self, limits: PoolLimits) -> None:
        self.budget.set_limits(limits)
        unused = self.pool.budget - limits.budget
        self.ahead.leave_unused(unused, is_settling=self.budget.is_settling)

    def evict(self, model: str) -> None:
        """Take back the model's mapped pages that nobody uses."""
        if pages := self.pool.unshelve(model):
            self.backing.give_back(model, pages)

    def replace_model(self, model: str) -> None:
        """The model goes and comes back; it has no sequence."""
        self.pool.remove_model(model)
        self.backing.remove_model(model)
        self._hold_to(self.budget.limits.without(model))
        self.pool.add_model(model, WIDTHS[model])
        self._add_range(model)

    def look_ahead(self, seconds: float = 0.0) -> None:
        """Time passes; mapping runs ahead of need."""
        self.now += seconds
        demand = dict.fromkeys(WIDTHS, 0)
        for sequence in self.live.values():
            demand[sequence.model] += 1
        for hint in self.ahead.hints(demand, self.now, may_withdraw=not self.budget.is_settling):
            if isinstance(hint, MemoryHint):
                self.backing.restore(hint.restored)
                self.backing.withdraw(hint.withdrawn)
            else:
                self.backing.give_back(hint.model, hint.given_back)
                self.backing.expect(hint.model, hint.expected)
        if isinstance(self.backing, VmmBacking):
            self.backing.drain()

    def held(self) -> dict[str, int]:
        return {model: self.pool.used(model) for model in WIDTHS}

    def check(self) -> None:
        """What holds at every step: owners, budget, floors, ceilings, and that whoever is live can end."""
        owned = [frame for sequence in self.live.values() for page in sequence.pages for frame in page]
        assert len(owned) == len(set(owned)), "a frame has two owners"
        assert 0 not in owned
        held = self.held()
        assert sum(held.values()) + self.pool.num_free + self.pool.num_withdrawn == self.pool.budget
        assert not set(owned) & set(self.pool.withdrawn), "a frame that was withdrawn has an owner"
        assert len(owned) == sum(held.values())
        limits = self.budget.limits
        if not self.budget.is_settling:
            assert limits.charge(held) <= limits.budget
            assert all(held[model] <= limits.ceiling(model) for model in WIDTHS)
        if self.budget.claims:
            left = min(claim.left for claim in self.budget.claims.values())
            assert left <= self.pool.num_free, "nobody can go on"

    def finish_all(self) -> None:
        """From wherever it is: everything ends, nobody starves, and every page comes back."""
        for step in list(self.steps):
            self.end_step(step)
        while self.live:
            progress = False
            for sequence_id in list(self.live):
                if not self.can_grow(sequence_id):
                    self.end(sequence_id)
                    progress = True
                else:
                    progress |= self.grow(sequence_id)
            assert progress, f"deadlock: {self.budget.claims} within {self.budget.limits}"
        assert not self.budget.is_settling
        assert self.pool.num_free + self.pool.num_withdrawn == self.pool.budget
        self.check()

    def close(self) -> None:
        """Give everything back; nothing of the driver's may be left."""
        for model in WIDTHS:
            self.backing.remove_model(model)
        self.driver.fails = lambda name: Status.SUCCESS
        self.backing.close()
        assert not self.driver.misuse, self.driver.misuse
        if isinstance(self.backing, VmmBacking):
            assert not self.driver.mapped
            assert not self.driver.contents

    def _add_range(self, model: str) -> None:
        for _ in range(1000):
            try:
                self.ranges[model] = self.backing.add_model(model, WIDTHS[model])
                return
            except DriverError:
                self.num_failed += 1
        raise AssertionError("a driver that always fails")

    def _extend(self, sequence_id: int, num_pages: int, *, is_decode: bool) -> None:
        sequence = self.live[sequence_id]
        pages = self.pool.allocate(sequence.model, num_pages)
        assert pages is not None, "the budget granted what the pool does not have"
        sequence.pages.extend(pages)
        try:
            spots = self.backing.spots(sequence.model, sequence_id, pages, is_decode=is_decode)
        except DriverError:
            self.num_failed += 1
            self.end(sequence_id)
            return
        sequence.spots.extend(spots)
        for index in range(len(sequence.spots) - len(spots), len(sequence.spots)):
            self._stamp(sequence_id, index)

    def _stamp(self, sequence_id: int, index: int) -> None:
        sequence = self.live[sequence_id]
        assert len(sequence.spots[index]) == len(sequence.pages[index]) == WIDTHS[sequence.model]
        for part, frame in enumerate(sequence.spots[index]):
            self._write(sequence.model, frame, (sequence_id, index, part))

    def _read(self, sequence_id: int) -> None:
        sequence = self.live[sequence_id]
        for index, spot in enumerate(sequence.spots):
            for part, frame in enumerate(spot):
                assert self._load(sequence.model, frame) == (sequence_id, index, part), "somebody else wrote here"

    def _write(self, model: str, frame: int, value: object) -> None:
        assert 0 < frame < self.ranges[model].num_frames
        if isinstance(self.backing, ArenaBacking):
            self.arena[frame] = value
        else:
            self.driver.write(self.ranges[model].base + frame * FRAME_BYTES, value)

    def _load(self, model: str, frame: int) -> object:
        if isinstance(self.backing, ArenaBacking):
            return self.arena[frame]
        return self.driver.read(self.ranges[model].base + frame * FRAME_BYTES)

    def _release(self, sequence_id: int) -> None:
        self._read(sequence_id)
        sequence = self.live.pop(sequence_id)
        self.backing.forget([sequence_id])
        self.pool.free(sequence.model, sequence.pages)
        self.budget.close(sequence_id)


def limits_of(world: PoolWorld, budget: float, model: str, floor: float, ceiling: float | None) -> PoolLimits:
    """The world's limits with a new budget and new limits of one model, as fractions of the pool."""
    width, most = WIDTHS[model], world.pool.budget
    floors = {**world.budget.limits.floors, model: int(most * floor) // width * width}
    ceilings = {**world.budget.limits.ceilings}
    ceilings.pop(model, None)
    if ceiling is not None:
        ceilings[model] = max(ceil_div(floors[model], width), int(most * ceiling) // width) * width
    return replace(PoolLimits(budget=int(most * budget)), floors=floors, ceilings=ceilings)
