"""`race`: work in the caller's task against an alarm; and the outputs of a group, in order, up to a failure."""

from __future__ import annotations

import asyncio

import pytest

from crosspool.core import FinishReason
from crosspool.server.errors import APIError
from crosspool.server.metrics import RequestMetrics
from crosspool.server.outputs import Indexed, OutputGroup
from crosspool.server.stream import ClientLeft, race
from tests.support.outputs import an_output


async def alarm_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise ClientLeft


def never() -> object:
    raise AssertionError("work that does not wait needs no alarm")


async def at_once() -> int:
    return 7


async def test_work_that_never_waits_costs_no_task() -> None:
    before = asyncio.all_tasks()
    assert await race(at_once(), never) == 7  # type: ignore[arg-type]
    assert asyncio.all_tasks() == before


async def test_the_alarm_ends_work_and_leaves_the_task_uncancelled() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(30)
        finally:
            ended = True

    with pytest.raises(ClientLeft):
        await race(work(), lambda: alarm_after(0.01))
    assert ended
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation left behind would be raised here
    assert asyncio.all_tasks() == {task}


async def test_work_that_ends_first_silences_the_alarm() -> None:
    assert await race(asyncio.sleep(0.01, 5), lambda: alarm_after(0.05)) == 5
    await asyncio.sleep(0.06)


@pytest.mark.parametrize("raised", [None, ValueError("no")])
async def test_work_that_ends_in_the_turn_of_the_alarm_has_ended(raised: Exception | None) -> None:
    """As where a client leaves while the last piece waits for it to read: both wake at once, the alarm first."""
    left, drained = asyncio.Event(), asyncio.Event()

    async def alarm() -> None:
        await left.wait()
        raise ClientLeft

    async def work() -> int:
        await drained.wait()
        if raised is not None:
            raise raised
        return 5

    asyncio.get_running_loop().call_later(0.01, lambda: (left.set(), drained.set()))
    if raised is None:
        assert await race(work(), alarm) == 5
    else:
        with pytest.raises(ValueError, match="no"):
            await race(work(), alarm)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation left behind would be raised here


async def test_what_work_raises_in_place_of_its_cancellation_leaves_the_task_uncancelled() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ValueError("no") from None

    with pytest.raises(ValueError, match="no"):
        await race(work(), lambda: alarm_after(0.01))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_work_raises_is_raised() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await race(work(), lambda: alarm_after(30))


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def outer() -> None:
        await race(asyncio.sleep(30), lambda: alarm_after(30))

    task = asyncio.create_task(outer())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Scripted:
    """An engine stream of given batches."""

    def __init__(self, *batches: list[FinishReason | None]) -> None:
        self._batches = [[an_output(reason) for reason in batch] for batch in batches]
        self.is_closed = False

    async def take(self, timeout_s: float | None = None):
        await asyncio.sleep(0)
        return self._batches.pop(0) if self._batches else None

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_outputs_before_a_failure_come_before_it(num_streams: int) -> None:
    streams = [Scripted([None], [None, FinishReason.ERROR, None]) for _ in range(num_streams)]
    group = OutputGroup(streams, 1, RequestMetrics().observer("m"))
    seen: list[Indexed] = []

    async def read() -> None:
        while (batch := await group.next()) is not None:
            seen.extend(batch)

    with pytest.raises(APIError, match="failed inside the engine"):
        await read()
    assert [index for index, _ in seen].count(0) == 2
    with pytest.raises(APIError):
        await group.next()
    await group.close()
    assert all(stream.is_closed for stream in streams)
