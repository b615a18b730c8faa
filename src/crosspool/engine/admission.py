"""Admission against the page budget of one KV rank: admit, queue, or refuse with the true numbers.

Both policies keep one invariant: live sequences can all end, in some order, each with the free frames and those of
the ones before it (Dijkstra's banker, for one resource). A page is granted only if the invariant holds after it, so
the sequence with least left to grow can always go on: nothing deadlocks and nothing running is preempted. What the
invariant keeps back from the others is the overflow reserve. Under `reserve` everything a sequence may reach is set
aside when it is admitted, so every grant holds; under `forecast` only what it is expected to reach.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError, ContextLengthError
from crosspool.units import ceil_div


@dataclass(slots=True)
class Claim:
    """Frames of one live sequence: in its block table, expected at its end, and the most it may reach."""

    held: int
    expected: int
    most: int

    def __post_init__(self) -> None:
        assert 0 <= self.held <= self.expected <= self.most, f"{self} does not ascend"


def can_all_end(num_free: int, claims: Iterable[Claim]) -> bool:
    """Whether the claims can reach their most one after another, each giving its frames back as it ends.

    Trying them by what is left to grow is enough: whoever can end now only adds to what the next ones have.
    """
    for claim in sorted(claims, key=lambda claim: claim.most - claim.held):
        if claim.most - claim.held > num_free:
            return False
        num_free += claim.held
    return True


class PageBudget:
    """The claims on one KV rank's frames. `held` of all of them together never exceeds `num_frames`."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.claims: dict[int, Claim] = {}

    @property
    def num_held(self) -> int:
        return sum(claim.held for claim in self.claims.values())

    @property
    def num_reserved(self) -> int:
        """Frames promised but not yet held: used, reserved and free add up to the budget."""
        promised = sum(claim.expected - claim.held for claim in self.claims.values())
        return min(promised, self.num_frames - self.num_held)

    def admits(self, claim: Claim) -> bool:
        """Whether a new sequence fits beside the live ones."""
        claims = [*self.claims.values(), claim]
        return sum(other.expected for other in claims) <= self.num_frames and self._is_safe(claims)

    def _is_safe(self, claims: list[Claim]) -> bool:
        if sum(claim.most for claim in claims) <= self.num_frames:
            return True  # even all at once; always so under `reserve`
        num_free = self.num_frames - sum(claim.held for claim in claims)
        return num_free >= 0 and can_all_end(num_free, claims)

    def open(self, sequence_id: int, claim: Claim) -> None:
        assert sequence_id not in self.claims
        self.claims[sequence_id] = claim

    def grow(self, sequence_id: int, num_frames: int, expected: int) -> bool:
        """Let the sequence hold `num_frames` more, expecting `expected` in all; False if it has to wait."""
        claim = self.claims[sequence_id]
        held = claim.held + num_frames
        assert held <= claim.most, f"sequence {sequence_id} grows to {held} frames, past its most, {claim.most}"
        grown = Claim(held, min(claim.most, max(held, expected)), claim.most)
        if not self._is_safe([grown if key == sequence_id else other for key, other in self.claims.items()]):
            return False
        self.claims[sequence_id] = grown
        return True

    def stop_growing(self, sequence_id: int) -> None:
        """The sequence has ended; it holds its frames until the step in flight that uses them ends."""
        claim = self.claims[sequence_id]
        self.claims[sequence_id] = Claim(claim.held, claim.held, claim.held)

    def close(self, sequence_id: int) -> None:
        self.claims.pop(sequence_id, None)


def capacity_tokens(model: ServedModel, num_frames: int) -> int:
    """Tokens one sequence of the model can hold when it has all `num_frames` frames of the pool."""
    return num_frames // model.frames_per_page * model.page_tokens


def context_limit(model: ServedModel, num_frames: int) -> int:
    """Prompt plus output tokens a request may ask for. Never above what the pool can hold for one.

    Raises CapacityError if the pool cannot hold one page of the model.
    """
    capacity = capacity_tokens(model, num_frames)
    if capacity < 2:
        raise CapacityError(
            f"a page of {model.name} takes {model.frames_per_page} frames and KV rank {model.kv_rank} has {num_frames}"
            f"; set kv_budget_bytes to {(model.frames_per_page + 1) * model.frame_bytes} or more"
        )
    return min(model.model_limit, capacity)


def check_length(model: ServedModel, num_frames: int, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises ContextLengthError or CapacityError, with the true numbers, for what can never fit."""
    total = num_prompt_tokens + max_tokens
    asked = f"{num_prompt_tokens} prompt tokens + {max_tokens} output tokens = {total}"
    if total > model.model_limit:
        raise ContextLengthError(
            f"{asked}, but the context limit of {model.name} is {model.model_limit} tokens; "
            + _remedy(model.model_limit, num_prompt_tokens)
        )
    capacity = capacity_tokens(model, num_frames)
    if total > capacity:
        raise CapacityError(
            f"{asked}, but the KV pool holds {capacity} tokens of one sequence of {model.name}; "
            + _remedy(capacity, num_prompt_tokens)
        )


def _remedy(limit: int, num_prompt_tokens: int) -> str:
    if num_prompt_tokens < limit:
        return f"ask for at most {limit - num_prompt_tokens} output tokens or shorten the prompt"
    return f"shorten the prompt to {limit - 1} tokens or fewer"


def frames_for(model: ServedModel, num_tokens: int) -> int:
    """Frames of the pages that hold `num_tokens` tokens."""
    return ceil_div(num_tokens, model.page_tokens) * model.frames_per_page
