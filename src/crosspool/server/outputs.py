"""The outputs of the engine requests that answer one HTTP request, merged in the order they come."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.errors import CrossPoolError
from crosspool.server.context import current
from crosspool.server.engine_client import EngineClient, OutputStream
from crosspool.server.errors import APIError, bad_request, from_engine
from crosspool.server.metrics import RequestMetrics, SequenceObserver

Indexed = tuple[int, RequestOutput]
"""A choice's index (prompt x n + sequence) and one of its outputs."""


class OutputGroup:
    """Outputs of all choices, as they come. `close` aborts what still runs, in whatever state it is."""

    def __init__(self, streams: Sequence[OutputStream], num_choices: int, observer: SequenceObserver) -> None:
        self._streams = streams
        self._observer = observer
        self.num_choices = num_choices
        self._ready: list[Indexed] = []
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._running = len(streams)
        self._pumps = [
            asyncio.create_task(self._pump(prompt, stream), name="output pump") for prompt, stream in enumerate(streams)
        ]

    async def next(self, timeout_s: float | None = None) -> list[Indexed] | None:
        """Every output that is here, waiting for one; None after the last; [] when `timeout_s` passes first.

        Raises APIError when a sequence ended with an error.
        """
        if not self._ready and self._failure is None and self._running:
            if timeout_s is None:
                await self._wake.wait()
            else:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._wake.wait()
                except TimeoutError:
                    return []
        self._wake.clear()
        ready, self._ready = self._ready, []
        if ready:
            return ready
        if self._failure is not None:
            raise self._failure
        return None if not self._running else []

    async def close(self) -> None:
        """Abort what still runs. Nothing of the group is left afterwards."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()

    async def _pump(self, prompt: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                self._observer.observe(prompt, output)
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise _failure(output)
                self._ready.append((prompt * self.num_choices + output.index, output))
                self._wake.set()
        except CrossPoolError as error:
            self._failure = from_engine(error)
        except APIError as error:
            self._failure = error
        finally:
            self._running -= 1
            self._wake.set()


async def open_group(
    engine: EngineClient, requests: Sequence[GenerationRequest], metrics: RequestMetrics
) -> OutputGroup:
    """Hand every request to the engine, or none: where one is refused, those before it are aborted.

    Raises APIError with the engine's refusal.
    """
    streams: list[OutputStream] = []
    try:
        for request in requests:
            streams.append(engine.generate(replace(request, key=current("key"))))
    except (CrossPoolError, ValueError) as error:
        for stream in streams:
            await stream.aclose()
        refusal = from_engine(error) if isinstance(error, CrossPoolError) else bad_request(str(error))
        metrics.refused(requests[0].model, refusal.code)
        raise refusal from error
    return OutputGroup(streams, requests[0].n, metrics.observer(requests[0].model))


def _failure(output: RequestOutput) -> APIError:
    if output.error is not None:
        return from_engine(output.error)
    reason = "was aborted" if output.finish_reason is FinishReason.ABORT else "failed"
    return APIError(500, f"the request {reason} inside the engine", code="engine_error")
