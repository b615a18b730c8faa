"""Every option of a request together, with steps handed out ahead, shared prefixes and several KV ranks: each answer is
that of the request alone, without either.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crosspool.core import FinishReason, SamplingParams
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from tests.support.engine_deployment import FAMILIES, FRAME_BYTES, Deployment, collect

NUM_REQUESTS = 20
SEED = 6


@dataclass
class EveryThird:
    """A grammar: of the 512 ids those whose remainder by 3 is that of the token's place."""

    place: int = 0

    @property
    def allowed(self) -> bytes:
        bits = bytearray(64)
        for token_id in range(self.place % 3, 512, 3):
            bits[token_id // 8] |= 1 << token_id % 8
        return bytes(bits)

    def advance(self, token_id: int) -> None:
        assert token_id % 3 == self.place % 3
        self.place += 1

    def fork(self) -> EveryThird:
        return EveryThird(self.place)


@dataclass(frozen=True)
class Answer:
    """What a caller sees of one sequence. The text is whole; how it was cut does not count."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_tokens: int
    logprobs: tuple[float, ...]

    def is_like(self, other: Answer) -> bool:
        """The same; logprobs up to rounding, which depends on the batch."""
        near = (math.isclose(a, b, abs_tol=1e-3) for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return replace(self, logprobs=()) == replace(other, logprobs=()) and all(near)


def answers(request: GenerationRequest, outputs: list[RequestOutput]) -> list[Answer]:
    found = []
    for index in range(request.n):
        own = [output for output in outputs if output.index == index]
        assert own[-1].error is None, own[-1].error
        assert all(output.finish_reason is None for output in own[:-1])
        found.append(
            Answer(
                tuple(token_id for output in own for token_id in output.token_ids),
                "".join(output.text for output in own),
                own[-1].finish_reason,
                own[-1].stop_reason,
                own[-1].usage.completion_tokens,
                tuple(entry.logprob for output in own for entry in output.logprobs or ()),
            )
        )
    return found


def random_requests(seed: int) -> list[GenerationRequest]:
    rng = random.Random(seed)
    shared = [[rng.randrange(1, 500) for _ in range(90)] for _ in range(2)]
    found = []
    for index in range(NUM_REQUESTS):
        max_tokens = rng.randint(1, 40)
        head = rng.choice(shared)[: rng.choice((0, 16, 48, 90))]
        found.append(
            GenerationRequest(
                request_id=f"options-{index}",
                model=rng.choice(FAMILIES),
                prompt_token_ids=(*head, *(rng.randrange(1, 500) for _ in range(rng.randint(1, 30)))),
                n=rng.choice((1, 1, 2, 4)),
                stop=tuple(rng.sample("etaoin shrdlu", rng.choice((0, 0, 13)))) + rng.choice(((), ("th", "in a"))),
                include_stop_str_in_output=rng.random() < 0.3,
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=rng.choice((0, 0, min(6, max_tokens))),
                    temperature=rng.choice((0.0, 0.8, 1.0)),
                    top_p=rng.choice((1.0, 0.9)),
                    top_k=rng.choice((0, 20)),
                    min_p=rng.choice((0.0, 0.02)),
                    presence_penalty=rng.choice((0.0, 0.5)),
                    frequency_penalty=rng.choice((0.0, 0.4)),
                    repetition_penalty=rng.choice((1.0, 1.3)),
                    logit_bias=rng.choice(((), ((0, 6.0), (11, -100.0)))),  # 0 ends an answer
                    stop_token_ids=tuple(rng.sample(range(5, 500), rng.choice((0, 30)))),
                    ignore_eos=rng.random() < 0.4,
                    num_logprobs=rng.choice((None, 0, 2)),
                ),
                seed=rng.randrange(10**6),
                constraint=EveryThird() if rng.random() < 0.2 else None,
                cache_salt=rng.choice((None, None, "salt")),
            )
        )
    return found


@pytest.fixture(scope="module")
def alone(directories: dict[str, Path]) -> dict[str, list[Answer]]:
    """Each request by itself, nothing cached and no step handed out behind another one."""

    async def ask() -> dict[str, list[Answer]]:
        async with Deployment(directories, "inprocess", prefix_caching=False, max_num_batched_tokens=128) as deployment:
            return {r.request_id: answers(r, await collect(deployment.engine, r)) for r in random_requests(SEED)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "schedule_ahead", lambda core, now: [])
        return asyncio.run(ask())


@pytest.mark.parametrize(
    ("admission", "split", "kv_ranks"),
    [
        ("reserve", "auto", ("kv0",)),
        ("forecast", "auto", ("kv0",)),
        ("reserve", "auto", ("kv0", "kv1")),
        ("forecast", "one", ("kv0", "kv1")),
    ],
)
def test_all_options_at_once_give_each_request_the_answer_it_has_alone(directories, alone, admission, split, kv_ranks):
    async def ask() -> None:
        changes = {"admission": admission, "forecast_quantile": 0.5, "kv_ranks": kv_ranks, "kv_split": split}
        async with Deployment(directories, "inprocess", kv_budget_bytes=90 * FRAME_BYTES, **changes) as deployment:
            for _ in range(2):  # the second time with what the first one left in the cache
                todo = random_requests(SEED)
                results = await asyncio.gather(*(collect(deployment.engine, request) for request in todo))
                for request, outputs in zip(todo, results, strict=True):
                    for mine, want in zip(answers(request, outputs), alone[request.request_id], strict=True):
                        assert mine.is_like(want), (request, mine, want)
                await deployment.until_free()
            assert deployment.engine.stats().models[0].prefix_hits > 0

    asyncio.run(ask())


def test_the_requests_reach_what_they_are_for(alone):
    """Answers end in every way there is; without that the comparison would show little."""
    ends = [answer for found in alone.values() for answer in found]
    assert sum(isinstance(answer.stop_reason, str) for answer in ends) >= 3
    assert sum(isinstance(answer.stop_reason, int) for answer in ends) >= 3
    assert sum(answer.finish_reason is FinishReason.LENGTH for answer in ends) >= 3
