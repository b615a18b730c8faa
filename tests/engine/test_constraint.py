"""A sequence's constraint: every token obeys it, also when KV is lost; one that cannot go on ends its request alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from crosspool.core import FinishReason
from crosspool.errors import ConstraintError
from tests.support.engine_deployment import Deployment, collect, requests, token_ids


@dataclass
class Countdown:
    """Allows two tokens that depend on how many came before; fails after `limit` of them."""

    limit: int = 10**6
    seen: list[int] = field(default_factory=list)

    def choices(self, place: int) -> tuple[int, int]:
        return (10 + place % 40, 300 + place % 40)

    @property
    def allowed(self) -> bytes:
        bits = bytearray(64)
        for token in self.choices(len(self.seen)):
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def advance(self, token_id: int) -> None:
        assert token_id in self.choices(len(self.seen)), f"{token_id} at {len(self.seen)}"
        self.seen.append(token_id)
        if len(self.seen) >= self.limit:
            raise ConstraintError("it grew too complex (scripted)")

    def fork(self) -> Countdown:
        return Countdown(self.limit, list(self.seen))


async def test_every_token_is_allowed_though_the_kv_rank_is_killed(directories: dict[str, Path]) -> None:
    async with Deployment(directories, "processes") as deployment:
        todo = [replace(request, constraint=Countdown()) for request in requests(3, 60)]
        undisturbed = [token_ids(await collect(deployment.engine, request)) for request in todo]
        tasks = [asyncio.create_task(collect(deployment.engine, request)) for request in todo]
        steps = deployment.engine.stats().num_steps
        while deployment.engine.stats().num_steps < steps + 20:
            await asyncio.sleep(0.005)
        deployment.kill("kv0")
        for outputs, before in zip(await asyncio.gather(*tasks), undisturbed, strict=True):
            assert outputs[-1].error is None, outputs[-1].error
            assert token_ids(outputs) == before
            assert all(token in Countdown().choices(place) for place, token in enumerate(before))
        assert deployment.engine.stats().num_ranks_lost == 1


async def test_a_constraint_that_cannot_go_on_ends_its_request_alone(directories: dict[str, Path]) -> None:
    async with Deployment(directories, "inprocess") as deployment:
        first, second, *_ = requests(2, 12)
        bounded = replace(first, constraint=Countdown(limit=5))
        ended, free = await asyncio.gather(*(collect(deployment.engine, r) for r in (bounded, second)))
        assert ended[-1].finish_reason is FinishReason.ERROR
        assert isinstance(ended[-1].error, ConstraintError)
        assert free[-1].finish_reason is FinishReason.LENGTH
        await deployment.until_free()
