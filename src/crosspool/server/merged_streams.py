"""Several engine streams read as one: a completion request with several prompts."""

import asyncio
import contextlib
from collections.abc import Sequence

from crosspool.engine.output import RequestOutput
from crosspool.server.engine_client import OutputStream

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
