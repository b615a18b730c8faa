"""Greedy requests of a running engine, and whether answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crosspool.core import SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.request import GenerationRequest

TIE_NATS = 0.05
"""Log-probabilities this close count as a tie: bfloat16 hidden states move logits by about that much."""


@dataclass(frozen=True)
class Plan:
    """One greedy request."""

    model: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Answer:
    """Tokens, and when each came (time.perf_counter). has_left: its client was content with these."""

    plan: Plan
    token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    error: str = ""
    has_left: bool = False


class Traffic:
    """Runs plans through the engine, and remembers when each model last gave a token."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine, self._count = engine, 0
        self.last_token: dict[str, float] = {}

    async def ask(
        self, plan: Plan, logprobs: int | None = None, leaves_after: int | None = None
    ) -> tuple[Answer, dict[int, float]]:
        """The answer, and the likeliest tokens' log-probabilities at its first place where asked for.

        leaves_after: tokens with which the client goes away, if the answer has more.
        """
        self._count += 1
        answer, likely = Answer(plan), dict[int, float]()
        sampling = SamplingParams(max_tokens=plan.max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=logprobs)
        request = GenerationRequest(
            request_id=str(self._count), model=plan.model, prompt_token_ids=plan.prompt, sampling=sampling, seed=0
        )
        try:
            async for output in self.engine.generate(request):
                now = time.perf_counter()
                answer.token_ids += output.token_ids
                answer.moments += [now] * len(output.token_ids)
                if output.token_ids:
                    self.last_token[plan.model] = now
                if output.error is not None:
                    answer.error = str(output.error)
                if output.logprobs and not likely:
                    likely = {each.token_id: each.logprob for each in output.logprobs[0].top}
                if leaves_after is not None and leaves_after <= len(answer.token_ids) < plan.max_tokens:
                    answer.has_left = True
                    break
        except Exception as failure:  # a refusal is an outcome here, and is counted
            answer.error = f"{type(failure).__name__}: {failure}"
        return answer, likely

    async def ask_all(self, plans: Sequence[Plan], at_once: int) -> list[Answer]:
        limit = asyncio.Semaphore(at_once)

        async def one(plan: Plan) -> Answer:
            async with limit:
                return (await self.ask(plan))[0]

        return await asyncio.gather(*(one(plan) for plan in plans))

    async def is_tie(self, expected: Answer, found: Answer) -> bool:
        """Whether the first token that differs was nearly as likely as the expected one."""
        pairs = zip(expected.token_ids, found.token_ids, strict=False)
        place = next(index for index, (a, b) in enumerate(pairs) if a != b)
        prompt = expected.plan.prompt + tuple(expected.token_ids[:place])
        _, likely = await self.ask(Plan(expected.plan.model, prompt, 1), logprobs=8)
        first, second = (likely.get(each.token_ids[place]) for each in (expected, found))
        return first is not None and second is not None and abs(first - second) <= TIE_NATS


@dataclass
class Verdict:
    """How many answers were whole, the same, and different by ties alone."""

    num: int
    whole: int = 0
    same: int = 0
    ties: int = 0


async def judge(traffic: Traffic, pairs: Sequence[tuple[Answer, Answer]]) -> Verdict:
    """(undisturbed, found) each."""
    verdict = Verdict(len(pairs))
    for expected, found in pairs:
        is_whole = not found.error and len(found.token_ids) == found.plan.max_tokens
        verdict.whole += is_whole
        is_same = found.token_ids == expected.token_ids
        verdict.same += is_same
        if is_whole and not is_same:
            verdict.ties += await traffic.is_tie(expected, found)
    return verdict


def plans(names: Sequence[str], sizes: Sequence[int], vocab: int, count: int, max_tokens: int) -> list[Plan]:
    """Models in turn, and prompt lengths in turn for each model."""
    rng = np.random.default_rng(7)
    lengths = [sizes[(number // len(names)) % len(sizes)] for number in range(count)]
    return [
        Plan(names[number % len(names)], tuple(rng.integers(1, vocab, size=length).tolist()), max_tokens)
        for number, length in enumerate(lengths)
    ]
