"""The page budget under floors and ceilings that change while sequences live: they hold, and nothing deadlocks."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim, can_all_end_within
from crosspool.kv_pool.limits import PoolLimits

NUM_FRAMES = 14
MODELS = "pqr"


@st.composite
def pool_limits(draw) -> PoolLimits:
    """Limits that can be held: what `check_limits` lets pass for pages of one frame."""
    budget = draw(st.integers(6, NUM_FRAMES))
    floors, left = {}, budget
    for model in MODELS:
        floors[model] = draw(st.integers(0, min(4, left)))
        left -= floors[model]
    ceilings = {
        model: draw(st.integers(max(1, floors[model]), NUM_FRAMES)) for model in draw(st.sets(st.sampled_from(MODELS)))
    }
    return PoolLimits(budget=budget, floors=floors, ceilings=ceilings)


@st.composite
def some_claims(draw) -> list[Claim]:
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(MODELS)), max_size=5))
    return [Claim(min(a, b), max(a, b), max(a, b), model) for a, b, model in pairs]


@settings(max_examples=300)
@given(limits=pool_limits(), claims=some_claims())
def test_can_all_end_within_agrees_with_trying_every_order(limits, claims):
    def may_hold(held: dict[str, int]) -> bool:
        within = all(held[model] <= limits.ceiling(model) for model in MODELS)
        return within and limits.charge(held) <= limits.budget

    def ends(order) -> bool:
        held = {model: sum(claim.held for claim in claims if claim.model == model) for model in MODELS}
        if not may_hold(held):
            return False
        for claim in order:
            if not may_hold({**held, claim.model: held[claim.model] + claim.left}):
                return False
            held[claim.model] -= claim.held
        return True

    assert can_all_end_within(limits, claims) == any(ends(order) for order in permutations(claims))


class LimitedBudget(RuleBasedStateMachine):
    """Sequences of three models come, grow and end, with wrong forecasts, while limits change under them."""

    policy = "forecast"

    def __init__(self) -> None:
        super().__init__()
        self.budget = PageBudget(NUM_FRAMES)
        self.next_id = 0
        self.changed = False

    @rule(held=st.integers(1, 3), more=st.integers(0, 6), optimism=st.floats(0, 1), model=st.sampled_from(MODELS))
    def admit(self, held, more, optimism, model):
        expected = held + (more if self.policy == "reserve" else int(more * optimism))
        claim = Claim(held, expected, held + more, model)
        was_settling = self.budget.is_settling
        if self.budget.admits(claim):
            assert not self.budget.is_capped(claim)
            self.budget.open(self.next_id, claim)
            self.next_id += 1
            if was_settling:
                assert self.expected(model) <= self.budget.limits.ceiling(model)

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.budget.claims)))

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def grow(self, data):
        sequence_id = self.pick(data)
        claim = self.budget.claims[sequence_id]
        if claim.left:
            granted = self.budget.grow(sequence_id, 1, claim.expected)
            assert self.budget.claims[sequence_id].held == claim.held + granted
            assert granted or self.policy == "forecast", "a reserved page was not granted"

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def end(self, data):
        self.budget.close(self.pick(data))

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def stop_growing(self, data):
        self.budget.stop_growing(self.pick(data))

    @rule(limits=pool_limits())
    def change(self, limits):
        held = {key: claim.held for key, claim in self.budget.claims.items()}
        self.budget.set_limits(limits)
        assert {key: claim.held for key, claim in self.budget.claims.items()} == held

    def held(self, model: str) -> int:
        return sum(claim.held for claim in self.budget.claims.values() if claim.model == model)

    def expected(self, model: str) -> int:
        return sum(claim.expected for claim in self.budget.claims.values() if claim.model == model)

    @invariant()
    def limits_hold_unless_settling(self):
        limits = self.budget.limits
        assert self.budget.num_held <= NUM_FRAMES
        if not self.budget.is_settling:
            held = {model: self.held(model) for model in MODELS}
            assert limits.charge(held) <= limits.budget
            assert all(held[model] <= limits.ceiling(model) for model in MODELS)

    @invariant()
    def somebody_can_always_go_on(self):
        if self.budget.claims:
            free = NUM_FRAMES - self.budget.num_held
            assert min(claim.left for claim in self.budget.claims.values()) <= free

    def teardown(self):
        """From wherever the random operations led: everything can end, and then the limits hold again."""
        for _ in range(1000):
            if not self.budget.claims:
                assert not self.budget.is_settling
                return
            progress = False
            for sequence_id in list(self.budget.claims):
                if self.budget.claims[sequence_id].left == 0:
                    self.budget.close(sequence_id)
                    progress = True
                else:
                    progress |= self.budget.grow(sequence_id, 1, 0)
            assert progress, f"deadlock: {self.budget.claims} within {self.budget.limits}"
        raise AssertionError(f"nothing ends: {self.budget.claims}")


class ReservedBudget(LimitedBudget):
    """The same where everything is set aside: no sequence ever waits for a page, whatever the limits become."""

    policy = "reserve"


TestLimitedBudget = LimitedBudget.TestCase
TestReservedBudget = ReservedBudget.TestCase


def test_a_floor_is_kept_and_its_model_gets_it_at_once():
    budget = PageBudget(10, PoolLimits(budget=10, floors={"p": 4}))
    budget.open(1, Claim(1, 6, 6, "q"))
    assert not budget.admits(Claim(1, 1, 1, "q")), "q may have six frames beside the floor of p"
    assert budget.admits(Claim(1, 4, 4, "p"))
    assert not budget.admits(Claim(1, 5, 5, "p"))


def test_a_ceiling_binds_its_model_alone():
    budget = PageBudget(10, PoolLimits(budget=10, ceilings={"p": 3}))
    budget.open(1, Claim(2, 2, 2, "p"))
    assert budget.is_capped(Claim(1, 2, 2, "p"))
    assert not budget.admits(Claim(1, 2, 2, "p"))
    assert budget.admits(Claim(1, 8, 8, "q"))


def test_live_sequences_keep_what_they_were_promised_when_the_budget_shrinks():
    budget = PageBudget(10)
    budget.open(1, Claim(1, 8, 8, "p"))
    budget.set_limits(PoolLimits(budget=4))
    assert budget.is_settling
    assert not budget.admits(Claim(1, 1, 1, "q"))
    assert all(budget.grow(1, 1, 8) for _ in range(7))
    budget.close(1)
    assert not budget.is_settling
    assert budget.admits(Claim(1, 4, 4, "q"))
    assert not budget.admits(Claim(1, 5, 5, "q"))


def test_a_raised_floor_is_served_from_what_comes_free_first():
    budget = PageBudget(10)
    budget.open(1, Claim(4, 4, 4, "p"))
    budget.open(2, Claim(4, 4, 4, "p"))
    budget.set_limits(PoolLimits(budget=10, floors={"q": 6}))
    assert budget.is_settling
    assert budget.admits(Claim(1, 2, 2, "q")), "two frames are free, and they are kept for q"
    assert not budget.admits(Claim(1, 1, 1, "p"))
    budget.close(1)
    assert not budget.is_settling
    assert not budget.admits(Claim(1, 1, 1, "p"))
    assert budget.admits(Claim(1, 6, 6, "q"))


def test_under_a_forecast_no_model_outgrows_its_ceiling():
    budget = PageBudget(10, PoolLimits(budget=10, ceilings={"p": 4}))
    for sequence_id in (1, 2):
        assert budget.admits(Claim(1, 1, 3, "p"))
        budget.open(sequence_id, Claim(1, 1, 3, "p"))
    assert budget.grow(1, 1, 1)
    assert not budget.grow(2, 1, 1), "then neither could end within the ceiling, although six frames are free"
    assert budget.grow(1, 1, 1)


def test_not_even_a_floor_is_served_beyond_a_smaller_budget():
    budget = PageBudget(14)
    budget.open(1, Claim(8, 8, 8, "p"))
    budget.set_limits(PoolLimits(budget=9, floors={"q": 3}))
    assert budget.is_settling
    assert budget.admits(Claim(1, 1, 1, "q"))
    assert not budget.admits(Claim(1, 2, 2, "q")), "six frames are there, one is within the budget"


def test_a_floor_is_not_served_while_that_could_keep_others_from_ending():
    budget = PageBudget(10)
    budget.open(1, Claim(4, 4, 10, "p"))
    budget.set_limits(PoolLimits(budget=8, floors={"q": 6}))
    assert budget.is_settling
    assert budget.admits(Claim(2, 2, 4, "q"))
    assert not budget.admits(Claim(2, 2, 8, "q")), "each would need six of the four frames left"
