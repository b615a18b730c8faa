"""The page budget: what is admitted can end, whatever the forecast; estimates; refusals with true numbers."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim, can_all_end
from crosspool.engine.forecast import MIN_LENGTHS, NUM_LENGTHS_KEPT, Forecast, Reserve, output_estimate
from crosspool.engine.lengths import check_length, frames_for
from crosspool.errors import CapacityError, ContextLengthError
from tests.support.core_drive import a_model

claims = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: Claim(min(pair), max(pair), max(pair)))


@given(num_free=st.integers(0, 8), claims=st.lists(claims, max_size=5))
def test_can_all_end_agrees_with_trying_every_order(num_free, claims):
    def ends(order) -> bool:
        free = num_free
        for claim in order:
            if claim.most - claim.held > free:
                return False
            free += claim.held
        return True

    assert can_all_end(num_free, claims) == any(ends(order) for order in permutations(claims))


class BudgetMachine(RuleBasedStateMachine):
    """Sequences come, grow a frame at a time and end, with forecasts that are as wrong as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = PageBudget(12)
        self.next_id = 0

    @rule(held=st.integers(1, 4), more=st.integers(0, 10), optimism=st.floats(0, 1))
    def admit(self, held, more, optimism):
        claim = Claim(held, held + int(more * optimism), held + more)
        if self.budget.admits(claim):
            self.budget.open(self.next_id, claim)
            self.next_id += 1

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def grow(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.budget.claims)))
        claim = self.budget.claims[sequence_id]
        if claim.held < claim.most:
            granted = self.budget.grow(sequence_id, 1, claim.expected)
            assert self.budget.claims[sequence_id].held == claim.held + granted

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def end(self, data):
        self.budget.close(data.draw(st.sampled_from(sorted(self.budget.claims))))

    @precondition(lambda self: self.budget.claims)
    @rule(data=st.data())
    def stop_growing(self, data):
        self.budget.stop_growing(data.draw(st.sampled_from(sorted(self.budget.claims))))

    @invariant()
    def the_budget_holds_and_somebody_can_always_go_on(self):
        assert 0 <= self.budget.num_held <= 12
        assert 0 <= self.budget.num_reserved <= 12 - self.budget.num_held
        if self.budget.claims:
            nearest = min(self.budget.claims, key=lambda key: self.left(key))
            assert self.left(nearest) <= 12 - self.budget.num_held

    def left(self, sequence_id: int) -> int:
        claim = self.budget.claims[sequence_id]
        return claim.most - claim.held

    def teardown(self):
        """From wherever the random operations led: everything can end."""
        for _ in range(1000):
            if not self.budget.claims:
                return
            for sequence_id in list(self.budget.claims):
                if self.left(sequence_id) == 0:
                    self.budget.close(sequence_id)
                else:
                    self.budget.grow(sequence_id, 1, 0)
        raise AssertionError(f"deadlock: {self.budget.claims}")


TestBudgetMachine = BudgetMachine.TestCase


def test_reserve_sets_everything_aside_and_never_lets_a_sequence_wait():
    budget = PageBudget(10)
    assert budget.admits(Claim(1, 6, 6))
    budget.open(1, Claim(1, 6, 6))
    assert not budget.admits(Claim(1, 5, 5))
    assert budget.admits(Claim(1, 4, 4))
    budget.open(2, Claim(1, 4, 4))
    assert (budget.num_held, budget.num_reserved) == (2, 8)
    for sequence_id, most in ((1, 6), (2, 4)):
        for _ in range(most - 1):
            assert budget.grow(sequence_id, 1, most)
    assert (budget.num_held, budget.num_reserved) == (10, 0)


def test_forecast_admits_more_and_keeps_an_overflow_back():
    budget = PageBudget(10)
    for sequence_id in range(4):
        assert budget.admits(Claim(1, 2, 6))
        budget.open(sequence_id, Claim(1, 2, 6))
    assert budget.num_reserved == 4
    grown = [budget.grow(sequence_id, 1, 2) for _ in range(5) for sequence_id in range(4)]
    assert not all(grown)
    assert any(claim.held == 6 for claim in budget.claims.values())


def test_the_forecast_is_a_quantile_of_longer_outputs():
    forecast = Forecast(0.9)
    for length in range(1, 101):
        forecast.record("p", length)
    assert forecast.expected_tokens("p", 0, 1000) == 90
    assert forecast.expected_tokens("p", 50, 1000) == 95
    assert forecast.expected_tokens("p", 50, 60) == 60
    assert forecast.expected_tokens("p", 100 - MIN_LENGTHS + 1, 1000) == 1000  # too few longer ones
    assert forecast.expected_tokens("q", 0, 1000) == 1000
    forecast.forget("p")
    assert forecast.expected_tokens("p", 0, 1000) == 1000


def test_the_forecast_forgets_old_outputs():
    forecast = output_estimate("forecast", 1.0)
    for length in [900] * 10 + [5] * NUM_LENGTHS_KEPT:
        forecast.record("p", length)
    assert forecast.expected_tokens("p", 0, 1000) == 5
    assert isinstance(output_estimate("reserve", 1.0), Reserve)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "numbers"),
    [
        (
            9,
            1020,
            ContextLengthError,
            r"9 prompt tokens \+ 1020 output tokens = 1029, but the context limit of p is 1024",
        ),
        (1025, 1, ContextLengthError, "1025 prompt tokens .* shorten the prompt to 1023"),
        (800, 10, CapacityError, r"800 prompt tokens \+ 10 output tokens = 810, but the KV pool holds 768 tokens"),
        (700, 300, CapacityError, "ask for at most 68 output tokens"),
    ],
)
def test_refusals_hold_true_numbers(prompt, max_tokens, kind, numbers):
    model = a_model("p", page_tokens=16, frames_per_page=2, max_context=1024)
    with pytest.raises(kind, match=numbers) as refusal:
        check_length(model, 97, prompt, max_tokens)
    assert type(refusal.value) is kind


def test_what_fits_exactly_is_not_refused():
    model = a_model("p", page_tokens=16, frames_per_page=2, max_context=1024)
    check_length(model, 96, 767, 1)
    check_length(model, 128, 1023, 1)
    assert [frames_for(model, tokens) for tokens in (1, 16, 17)] == [2, 2, 4]
