"""The tokens of simulated sequences: a pure function of seed and position."""

from __future__ import annotations

from collections.abc import Sequence

from crosspool.scheduler.step import NewSequence, StepRow

VOCAB_SIZE = 64


def token_at(seed: int, position: int) -> int:
    """The token a sequence has at `position`: all that decides it is its seed."""
    return hash((seed, position)) ** 2 // 2**60 % VOCAB_SIZE  # middle bits of a square: looks random, costs little


def expected_tokens(
    seed: int, num_prompt_tokens: int, max_tokens: int, stops: Sequence[int], min_tokens: int = 0
) -> list[int]:
    """What an undisturbed run generates."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, num_prompt_tokens + len(tokens)))
        if len(tokens) >= min_tokens and tokens[-1] in stops:
            break
    return tokens


def is_end(new: NewSequence, row: StepRow, token_id: int) -> bool:
    """Whether the engine ends the sequence with the token that the row drew."""
    num_output = row.num_cached_tokens + row.num_new_tokens - len(new.prompt_token_ids) + 1
    return num_output >= new.sampling.min_tokens and token_id in new.sampling.stop_token_ids
