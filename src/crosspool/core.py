"""The nouns every component shares: a request, how it is sampled, what comes out."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, Self


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the context limit
    ABORT = "abort"  # the client left
    ERROR = "error"  # the message is in the output's `error`


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Bounds are checked where requests enter (`server/protocol.py`, `__post_init__`).

    Penalties: presence and frequency look at generated tokens only; repetition at prompt and output.
    logprobs are those of the model's distribution before temperature, cuts, penalties and bias.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-5 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # always set: the engine draws one for requests without
    stop_token_ids: tuple[int, ...] = ()  # end tokens of the model included, unless ignore_eos
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; 0: the chosen token's only

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens {self.max_tokens}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias change every token's logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its log-probability, floored at -9999 so that JSON can hold it."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """What sampling gave one sequence in one step."""

    sequence_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class TokenConstraint(Protocol):
    """What one sequence's next token may be, given those it has: the state of a grammar. Owned by one sequence.

    It follows tokens, not KV, so it stays as it is when a sequence's KV is lost.
    """

    @property
    def allowed(self) -> bytes:
        """A bit for each token id, the lowest bit of the first byte for id 0; ids beyond its end are not allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """Take in the newest token, unless it ends the sequence. Raises ConstraintError where it cannot go on."""
        ...

    def fork(self) -> Self:
        """One of its own for another sequence, in the same state."""
        ...


@dataclass(kw_only=True, slots=True)
class Request:
    """One sequence to generate. `n > 1` is n requests of one group; stop strings are watched by the caller's side."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None  # on the clock of arrival_s; past it, a queued request is dropped
    key: str = ""  # whose it is: API keys take turns in a model's queue
    cache_salt: str | None = None  # requests share cached prefixes only with those of the same salt
    output_token_ids: list[int] = field(default_factory=list)
    constraint: TokenConstraint | None = None
    has_stop_strings: bool = False  # the caller's side wants to see each token before the next is run
