"""Several streams read as one: everything of each, in its order, and a failure once, behind what came before it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from crosspool.server.outputs import MergedStreams


class ScriptedStream:
    """Gives `parts`, then raises `failure` or ends; waits where a part is None until `go_on` is set."""

    def __init__(self, *parts: list[Any] | None, failure: Exception | None = None) -> None:
        self.parts, self.failure, self.go_on = list(parts), failure, asyncio.Event()

    async def take(self, timeout_s: float | None = None) -> list[Any] | None:
        await asyncio.sleep(0)
        if not self.parts:
            if self.failure is not None:
                raise self.failure
            return None
        part = self.parts.pop(0)
        if part is None:
            await self.go_on.wait()
            return await self.take()
        return part


async def everything(merged: MergedStreams) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    while (parts := await merged.take(1.0)) is not None:
        for place, outputs in parts:
            found.setdefault(place, []).extend(outputs)
    return found


async def test_every_output_of_each_stream_comes_in_its_order() -> None:
    streams: Any = [ScriptedStream([1], [2, 3]), ScriptedStream(), ScriptedStream([4], [5])]
    merged = MergedStreams(streams)
    assert await everything(merged) == {0: [1, 2, 3], 2: [4, 5]}
    await merged.close()


async def test_outputs_before_a_failure_come_before_it_and_it_comes_once() -> None:
    streams: Any = [ScriptedStream([1], failure=RuntimeError("lost")), ScriptedStream([2])]
    merged = MergedStreams(streams)
    for _ in range(20):  # turns of the event loop, in which all of it happens before anyone reads
        await asyncio.sleep(0)
    parts = await merged.take()
    assert sorted(parts or []) == [(0, [1]), (1, [2])]
    with pytest.raises(RuntimeError, match="lost"):
        await merged.take()
    await merged.close()


async def test_a_wait_that_is_over_gives_nothing_and_the_streams_go_on() -> None:
    stream: Any = ScriptedStream([1], None, [2])
    merged = MergedStreams([stream])
    assert await merged.take() == [(0, [1])]
    assert await merged.take(0.01) == []
    stream.go_on.set()
    assert await merged.take() == [(0, [2])]
    assert await merged.take() is None
    await merged.close()
