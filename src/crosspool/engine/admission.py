"""Admission against the page budget of one KV rank: admit, or queue.

Both policies keep one invariant: live sequences can all end, in some order (`claims.py`). A page is granted only if the
invariant holds after it, so the sequence with least left to grow can always go on: nothing deadlocks and nothing
running is preempted. What the invariant keeps back from the others is the overflow reserve. Under `reserve` everything
a sequence may reach is set aside when it is admitted, so every grant holds; under `forecast` only what it is expected
to reach.

Limits of the pool (`kv_pool/limits.py`) bind both: floors keep frames for a model against the others, ceilings bound
one, and all may change while sequences live.
"""

from collections.abc import Iterable

from crosspool.engine.claims import Claim, can_all_end, can_all_end_within
from crosspool.kv_pool.limits import PoolLimits


class PageBudget:
    """The claims on one KV rank's frames, and the limits they are held to.

    `held` of all claims together never exceeds `num_frames`, the frames that exist. The limits bind what is admitted at
    once. Live sequences keep what they were promised: where a limit was set below it, the budget is *settling*, and
    lets them go on within `num_frames` until enough of them have ended.
    """

    def __init__(self, num_frames: int, limits: PoolLimits | None = None) -> None:
        self.num_frames = num_frames
        self.limits = PoolLimits(budget=num_frames) if limits is None else limits
        self.claims: dict[int, Claim] = {}
        self.is_settling = False
        self._shared: dict[str, int] = {}  # by model: the id of its shared claim, below every sequence's
        self._fits_at_once: bool | None = None  # whether all can reach their most together; None: to be found out

    @property
    def num_held(self) -> int:
        return sum(claim.held for claim in self.claims.values())

    @property
    def num_reserved(self) -> int:
        """Frames promised but not yet held: used, reserved and free add up to the budget."""
        promised = sum(claim.expected - claim.held for claim in self.claims.values())
        return min(promised, self.num_frames - self.num_held)

    def set_limits(self, limits: PoolLimits) -> None:
        """Hold new sequences to `limits` from now on. The caller has checked them; nothing live is touched."""
        self.limits = limits
        self._fits_at_once = None
        self.is_settling = True
        self._settle()

    def admits(self, claim: Claim) -> bool:
        """Whether a new sequence fits beside the live ones."""
        if self.is_capped(claim):
            return False
        expected = self._expected(claim)
        within_budget = self.limits.charge(expected) <= self.limits.budget
        if not self.is_settling:
            return within_budget and self._is_safe([*self.claims.values(), claim])
        if not within_budget and not (self.is_floored(claim) and sum(expected.values()) <= self.limits.budget):
            return False
        return self._is_possible([*self.claims.values(), claim])

    @property
    def is_safe(self) -> bool:
        """Whether all live sequences can end: what every change but an end has to leave true."""
        claims = list(self.claims.values())
        return self._is_possible(claims) if self.is_settling else self._is_safe(claims)

    def room(self, model: str) -> int:
        """Frames that could be promised to new sequences of the model, if they asked for no more than they expect."""
        expected = self._expected()
        has = expected.get(model, 0)
        common = self.limits.budget - self.limits.charge(expected)
        return min(common + max(0, self.limits.floor(model) - has), self.room_under_ceiling(model))

    def room_under_ceiling(self, model: str) -> int:
        """The same if no other model had anything."""
        return self.limits.ceiling(model) - self._expected().get(model, 0)

    def room_in_floor(self, model: str) -> int:
        """The same of what is kept for the model."""
        return max(0, self.limits.floor(model) - self._expected().get(model, 0))

    def is_capped(self, claim: Claim) -> bool:
        """Whether the ceiling of its model keeps a new sequence out, however much is free."""
        ceiling = self.limits.ceiling(claim.model)
        if self._expected(claim)[claim.model] > ceiling:
            return True
        own = [*(other for other in self.claims.values() if other.model == claim.model), claim]
        return not can_all_end(ceiling - sum(other.held for other in own), own)

    def is_floored(self, claim: Claim) -> bool:
        """Whether a new sequence needs no more than what is kept for its model."""
        return self._expected(claim)[claim.model] <= self.limits.floor(claim.model)

    def _expected(self, claim: Claim | None = None) -> dict[str, int]:
        """Frames expected of each model, with those of a new claim."""
        expected: dict[str, int] = {} if claim is None else {claim.model: claim.expected}
        for other in self.claims.values():
            expected[other.model] = expected.get(other.model, 0) + other.expected
        return expected

    def _is_safe(self, claims: list[Claim]) -> bool:
        """Whether all can end within the limits."""
        return self._fit_at_once(claims) or can_all_end_within(self.limits, claims)

    def _fit_at_once(self, claims: Iterable[Claim]) -> bool:
        """Whether all can reach their most together; always so under `reserve`. What they hold makes no difference."""
        most: dict[str, int] = {}
        for claim in claims:
            most[claim.model] = most.get(claim.model, 0) + claim.most
        limits = self.limits
        return limits.charge(most) <= limits.budget and all(most[model] <= limits.ceiling(model) for model in most)

    def _is_possible(self, claims: list[Claim]) -> bool:
        """Whether all can end within the frames that exist."""
        num_free = self.num_frames - sum(claim.held for claim in claims)
        return num_free >= 0 and can_all_end(num_free, claims)

    def open(self, sequence_id: int, claim: Claim) -> None:
        assert sequence_id not in self.claims
        self.claims[sequence_id] = claim
        self._settle()

    def grow(self, sequence_id: int, num_frames: int, expected: int) -> bool:
        """Let the sequence hold `num_frames` more, expecting `expected` in all; False if it has to wait."""
        claim = self.claims[sequence_id]
        held = claim.held + num_frames
        assert held <= claim.most, f"sequence {sequence_id} grows to {held} frames, past its most, {claim.most}"
        grown = Claim(held, min(claim.most, max(held, expected)), claim.most, claim.model)
        if self._fits_at_once is None:
            self._fits_at_once = self._fit_at_once(self.claims.values())
        if self._fits_at_once and not self.is_settling:
            self.claims[sequence_id] = grown
            return True
        claims = [grown if key == sequence_id else other for key, other in self.claims.items()]
        if not (self._is_possible(claims) if self.is_settling else self._is_safe(claims)):
            return False
        self.claims[sequence_id] = grown
        return True

    def stop_growing(self, sequence_id: int) -> None:
        """The sequence has ended; it holds its frames until the step in flight that uses them ends."""
        claim = self.claims[sequence_id]
        self.claims[sequence_id] = Claim(claim.held, claim.held, claim.held, claim.model)
        self._settle()

    def share(self, sequence_id: int, num_frames: int) -> None:
        """Others use `num_frames` of a sequence's frames too from now on; less than 0: it has them alone again."""
        self._fits_at_once = None
        claim = self.claims[sequence_id]
        self.claims[sequence_id] = claim.changed(-num_frames)
        shared_id = self._shared.setdefault(claim.model, -1 - len(self._shared))
        shared = self.claims.pop(shared_id, Claim(0, 0, 0, claim.model, is_shared=True)).changed(num_frames)
        if shared.held:
            self.claims[shared_id] = shared

    def give_up(self, sequence_id: int, num_frames: int) -> None:
        """The sequence needs so many frames less: it uses those of others instead."""
        self.claims[sequence_id] = self.claims[sequence_id].changed(-num_frames)
        self._settle()

    def close(self, sequence_id: int) -> None:
        self.claims.pop(sequence_id, None)
        self._settle()

    def _settle(self) -> None:
        """Called after every change but growth: hold live sequences to the limits once all they were promised fits."""
        self._fits_at_once = None
        if not self.is_settling:
            return
        expected, limits = self._expected(), self.limits
        fits = limits.charge(expected) <= limits.budget
        fits = fits and all(count <= limits.ceiling(model) for model, count in expected.items())
        self.is_settling = not (fits and self._is_safe(list(self.claims.values())))
