"""Sequence: what the core knows of one accepted sequence, from its queue to its end."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from crosspool.core import FinishReason, Request, SampledToken
from crosspool.errors import CrossPoolError
from crosspool.kv_pool.block_table import BlockTable
from crosspool.kv_pool.prefix_cache import CachedPage, PrefixChain
from crosspool.scheduler.step import NewSequence


@dataclass(slots=True)
class SequencePrefix:
    """filled: an entry for each page that has been wholly written; None where another page was known by its key."""

    chain: PrefixChain
    filled: list[CachedPage | None] = field(default_factory=list)


class SequenceState(StrEnum):
    """Where a sequence is. PREFILLING and DECODING sequences are *live*: they hold pages."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"  # reported to its caller; its pages may wait for a step in flight


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """One sequence. Owned and changed by the engine's core alone.

    num_cached_tokens: slots written. num_steps: steps that are in flight or parked and have a row of it.
    num_ahead: tokens that these will give it.
    kv_rank: the home of its steps, once admitted. joined: the KV worker knows it. num_losses: KV ranks lost under it
    since its last token.
    num_reused_tokens: of its prompt, those that pages of others held when it started. prefix: its part in the cache.
    """

    sequence_id: int
    request: Request
    table: BlockTable
    kv_rank: str = ""
    state: SequenceState = SequenceState.QUEUED
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_ahead: int = 0
    joined: bool = False
    blocked_since_s: float | None = None  # since when it is the first of its queue and lacks pages
    scheduled_s: float | None = None
    num_losses: int = 0
    num_reused_tokens: int = 0
    prefix: SequencePrefix | None = None

    @property
    def in_step(self) -> bool:
        return self.num_steps > 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.request.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens it may reach: what `reserve` sets aside slots for."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens left to prefill."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def allowed(self) -> bytes | None:
        """The tokens its grammar lets come next, as in `StepRow`; None without one."""
        constraint = self.request.constraint
        return None if constraint is None else constraint.allowed

    def uncached(self, count: int) -> tuple[int, ...]:
        """The next `count` token ids to prefill."""
        return self.token_ids(self.num_cached_tokens, self.num_cached_tokens + count)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids at positions [start, stop), of prompt and output."""
        prompt, output = self.request.prompt_token_ids, self.request.output_token_ids
        head = tuple(prompt[start:stop])
        if stop <= len(prompt):
            return head
        return (*head, *output[max(0, start - len(prompt)) : stop - len(prompt)])

    def introduction(self) -> NewSequence:
        """What the KV worker must know of it before its first row."""
        return NewSequence(
            sequence_id=self.sequence_id,
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            output_token_ids=tuple(self.request.output_token_ids),
            sampling=self.request.sampling,
        )

    def take_step(self, num_tokens: int) -> None:
        """A step that gives it so many tokens has a row of it."""
        self.num_steps += 1
        self.num_ahead += num_tokens

    def leave_step(self, num_tokens: int) -> None:
        """The step is over for it; so many tokens of it never came, or have just been taken in."""
        self.num_steps -= 1
        self.num_ahead -= num_tokens

    def rewind(self) -> None:
        """Back to its queue: its KV is lost, its tokens stay."""
        self.state = SequenceState.QUEUED
        self.num_cached_tokens = 0
        self.num_steps = 0
        self.num_ahead = 0
        self.joined = False
        self.blocked_since_s = None

    def end_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, its newest token, or None if it goes on."""
        sampling = self.request.sampling
        if self.num_generated_tokens >= sampling.min_tokens and token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated_tokens >= sampling.max_tokens else None


class SequenceUpdate(NamedTuple):
    """What happened to a sequence: a token, its end, or both. cached_tokens: as `Sequence.num_reused_tokens`."""

    sequence_id: int
    time_s: float
    scheduled_s: float | None
    cached_tokens: int = 0
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: CrossPoolError | None = None

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        now: float,
        *,
        token: SampledToken | None = None,
        finish_reason: FinishReason | None = None,
        error: CrossPoolError | None = None,
    ) -> Self:
        """What has just happened to `sequence`."""
        return cls(
            sequence_id=sequence.sequence_id,
            time_s=now,
            scheduled_s=sequence.scheduled_s,
            cached_tokens=sequence.num_reused_tokens,
            token=token,
            finish_reason=finish_reason,
            error=error,
        )
