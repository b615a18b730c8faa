"""RequestStream and its office, over an engine of one line: outputs in batches, and few readers woken in a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from crosspool.core import FinishReason, SamplingParams
from crosspool.engine.async_engine import WAKES_A_TURN, AsyncEngine
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from tests.support.outputs import an_output


class OneStep:
    """Gives outputs when the test says so."""

    def __init__(self) -> None:
        self.takers: list[Callable[[RequestOutput], None]] = []
        self.flush: Callable[[], None] = lambda: None
        self.aborted: list[str] = []

    def submit(self, request: GenerationRequest, take, flush) -> None:
        self.takers.append(take)
        self.flush = flush

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    def step(self, reason: FinishReason | None = None) -> None:
        for take in self.takers:
            take(an_output(reason))
        self.flush()


def a_request(name: str = "r") -> GenerationRequest:
    sampling = SamplingParams(max_tokens=9)
    return GenerationRequest(request_id=name, model="m", prompt_token_ids=(1,), sampling=sampling)


@pytest.fixture
def engine() -> OneStep:
    return OneStep()


async def test_take_gives_all_that_is_here_and_none_after_the_last(engine: OneStep) -> None:
    stream = AsyncEngine(engine).generate(a_request())
    assert await stream.take(timeout_s=0.01) == []
    engine.step()
    engine.step()
    assert len(await stream.take() or ()) == 2
    engine.step(FinishReason.LENGTH)
    (last,) = await stream.take() or ()
    assert last.finish_reason is FinishReason.LENGTH
    assert await stream.take() is None
    await stream.aclose()
    assert engine.aborted == []


async def test_a_take_that_is_cancelled_aborts_the_request(engine: OneStep) -> None:
    stream = AsyncEngine(engine).generate(a_request())
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.aborted == ["r"]


async def test_a_step_of_many_sequences_wakes_a_few_readers_in_each_turn(engine: OneStep) -> None:
    face = AsyncEngine(engine)
    streams = [face.generate(a_request(f"r{number}")) for number in range(5 * WAKES_A_TURN)]
    read: list[int] = []
    turns: list[int] = []

    async def reader(number: int) -> None:
        await streams[number].take()
        read.append(number)

    tasks = [asyncio.create_task(reader(number)) for number in range(len(streams))]
    await asyncio.sleep(0)
    engine.step()
    while not all(task.done() for task in tasks):
        before = len(read)
        await asyncio.sleep(0)
        turns.append(len(read) - before)
    assert max(turns) <= WAKES_A_TURN
    assert read == list(range(len(streams)))
    for stream in streams:
        stream.abort()
