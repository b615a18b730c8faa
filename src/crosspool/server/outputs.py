"""The outputs of the engine requests that answer one HTTP request, merged in the order they come."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.errors import CrossPoolError
from crosspool.server.context import current
from crosspool.server.engine_client import EngineClient, OutputStream, info_of
from crosspool.server.errors import APIError, bad_request, from_engine
from crosspool.server.metrics import RequestMetrics, SequenceObserver

Part = tuple[int, list[RequestOutput]]
"""A stream's place and some of its outputs."""


class MergedStreams:
    """Reads every stream in a task of its own. What a stream raises is raised once, after the outputs before it."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._ready: list[Part] = []
        self._failure: Exception | None = None
        self._wake = asyncio.Event()
        self._running = len(streams)
        self._pumps = [
            asyncio.create_task(self._pump(place, stream), name="output pump") for place, stream in enumerate(streams)
        ]

    async def take(self, timeout_s: float | None = None) -> list[Part] | None:
        """As `OutputStream.take`, over all streams."""
        if not self._ready and self._failure is None and self._running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
        self._wake.clear()
        ready, self._ready = self._ready, []
        if ready:
            return ready
        if self._failure is not None:
            raise self._failure
        return [] if self._running else None

    async def close(self) -> None:
        """End the tasks; the streams themselves stay as they are."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, place: int, stream: OutputStream) -> None:
        try:
            while (outputs := await stream.take()) is not None:
                self._ready.append((place, outputs))
                self._wake.set()
        except Exception as error:  # kept for the reader, who raises it
            self._failure = error
        finally:
            self._running -= 1
            self._wake.set()


Indexed = tuple[int, RequestOutput]
"""A choice's index (prompt x n + sequence) and one of its outputs."""


class OutputGroup:
    """Outputs of all choices, as they come. `close` aborts what still runs, in whatever state it is."""

    def __init__(self, streams: Sequence[OutputStream], num_choices: int, observer: SequenceObserver) -> None:
        self._streams = streams
        self._merged = MergedStreams(streams) if len(streams) > 1 else None
        self._observer = observer
        self.num_choices = num_choices
        self._failure: APIError | None = None
        self._uncounted: list[tuple[int, RequestOutput]] = []  # of the last batch: sent first, counted after

    async def next(self, timeout_s: float | None = None) -> list[Indexed] | None:
        """Every output that is here, waiting for one; None after the last; [] when `timeout_s` passes first.

        Raises APIError when a sequence ended with an error.
        """
        self._count()
        if self._failure is not None:
            raise self._failure
        try:
            if self._merged is None:
                outputs = await self._streams[0].take(timeout_s)
                found = None if outputs is None else self._seen(0, outputs)
            else:
                parts = await self._merged.take(timeout_s)
                found = None if parts is None else [item for part in parts for item in self._seen(*part)]
        except CrossPoolError as error:
            raise from_engine(error) from error
        if not found and self._failure is not None:
            raise self._failure
        return found

    async def whole(self) -> list[Indexed]:
        """Every output there will be; the group is closed then. Raises as `next` does."""
        found: list[Indexed] = []
        try:
            while (batch := await self.next()) is not None:
                found += batch
        finally:
            await self.close()
        return found

    async def close(self) -> None:
        """Abort what still runs. Nothing of the group is left afterwards."""
        self._count()
        if self._merged is not None:
            await self._merged.close()
        for stream in self._streams:
            await stream.aclose()

    def _count(self) -> None:
        for prompt, output in self._uncounted:
            self._observer.observe(prompt, output)
        self._uncounted.clear()

    def _seen(self, prompt: int, outputs: Sequence[RequestOutput]) -> list[Indexed]:
        """The outputs by choice, up to the first that tells of a failure, which the next call raises."""
        found: list[Indexed] = []
        for output in outputs:
            self._uncounted.append((prompt, output))
            if self._failure is None and output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._failure = _failure(output)
            if self._failure is None:
                found.append((prompt * self.num_choices + output.index, output))
        return found


async def open_group(
    engine: EngineClient, requests: Sequence[GenerationRequest], metrics: RequestMetrics
) -> OutputGroup:
    """Hand every request to the engine, or none: where one is refused, those before it are aborted.

    Raises APIError with the engine's refusal, or for more choices than could ever be accepted at once.
    """
    name = requests[0].model
    num_choices, most = sum(request.n for request in requests), info_of(engine, name).max_sequences
    if most is not None and num_choices > most:
        refusal = bad_request(
            f"{num_choices} choices are asked for in one call (prompts x n); {name} takes at most {most} at a time, "
            "running and waiting; ask for fewer a call, or have the server started with a larger --max-queue",
            param="prompt" if len(requests) > 1 else "n",
            code="too_many_choices",
        )
        metrics.refused(name, refusal.code)
        raise refusal
    streams: list[OutputStream] = []
    key = current("key")
    try:
        for request in requests:
            streams.append(engine.generate(replace(request, key=key) if key else request))
    except (CrossPoolError, ValueError) as error:
        for stream in streams:
            await stream.aclose()
        refusal = from_engine(error) if isinstance(error, CrossPoolError) else bad_request(str(error))
        metrics.refused(name, refusal.code)
        raise refusal from error
    return OutputGroup(streams, requests[0].n, metrics.observer(name))


def _failure(output: RequestOutput) -> APIError:
    if output.error is not None:
        return from_engine(output.error)
    reason = "was aborted" if output.finish_reason is FinishReason.ABORT else "failed"
    return APIError(500, f"the request {reason} inside the engine", code="engine_error")
