"""What a stream yields: RequestOutput, with text, tokens, usage and times."""

from dataclasses import dataclass
from typing import NamedTuple

from crosspool.core import FinishReason, TokenLogprob
from crosspool.errors import CrossPoolError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a generated token and of the likeliest ones at its place (empty when none were asked)."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Usage(NamedTuple):
    """Tokens of one sequence so far.

    The end token and the tokens of a matched stop string count as completion tokens; tokens after them do not.
    cached_tokens: of the prompt, those that were not computed since cached pages held them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(NamedTuple):
    """Moments of one sequence on the engine's monotonic clock, in seconds; None until reached."""

    arrival_s: float
    scheduled_s: float | None = None  # its first prefill chunk was handed to a lane
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def queued_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one sequence gained since its last output; outputs of one request's n sequences interleave.

    text: whole characters only, never past a stop string; text that may yet become a stop string is held back, and
    tokens whose text is held back come with the output that releases it. Over a whole sequence `token_ids`,
    `token_times_s` and (where asked) `logprobs` have one entry for each completion token.
    The last output of each sequence, and only that, has a `finish_reason`; with ERROR also `error`.
    stop_reason: the stop string that matched or the end token's id.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    usage: Usage
    timings: Timings
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: CrossPoolError | None = None
