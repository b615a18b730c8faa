"""AsyncEngine: the engine for asyncio. `async for output in engine.generate(request)`."""

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.engine.step_log import StepSpan

if TYPE_CHECKING:
    from crosspool.engine.engine import Engine
    from crosspool.engine.limit_change import LimitChange
    from crosspool.engine.served_model import ServedModel

T = TypeVar("T")

WAKES_A_TURN = 1
"""Readers woken in one turn of the event loop, so that a step of many sequences holds up nobody who just came."""


class AsyncEngine:
    """Turns the engine thread's callbacks into streams; starts no task, so none is left behind."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._office: _PostOffice | None = None

    def generate(self, request: GenerationRequest) -> "RequestStream":
        """Accept `request` or refuse it now; then iterate the stream, which ends after the last of n sequences.

        Raises at once, before anything is queued: UnknownModelError, ValueError (a bad id), ContextLengthError and
        CapacityError (can never fit), QueueFullError (`retry_after_s`), WorkerLostError, ModelRemovedError,
        ShuttingDownError.
        A stream left early (break, `aclose`, a cancelled task, garbage collection) aborts its request.
        """
        loop = asyncio.get_running_loop()
        if self._office is None or self._office.loop is not loop:
            self._office = _PostOffice(loop)
        return RequestStream(self.engine, request, self._office)

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORT; False if it is not running."""
        return self.engine.abort(request_id)

    async def add_model(self, model: "ServedModel") -> ModelInfo:
        """Load a model and wait until it is ready.

        Raises CheckpointError, WorkerLostError where a rank is to blame, CapacityError or ValueError.
        """
        return await _result(self.engine.add_model(model))

    async def remove_model(self, name: str, *, drain: bool = True) -> None:
        """Take no more requests, let the running ones end (or end them with an error), then free its memory."""
        await _result(self.engine.remove_model(name, drain=drain))

    def set_limits(self, change: "LimitChange") -> None:
        """Change what models may hold in the KV pool, at once. Raises UnknownModelError or ValueError; see Engine."""
        self.engine.set_limits(change)

    def trim(self, model: str) -> int:
        """Give its cached pages that no request uses back to the pool; the number of frames. UnknownModelError."""
        return self.engine.trim(model)

    def models(self) -> list[ModelInfo]:
        """Every model, in the order they were added, loading and failed ones included."""
        return self.engine.models()

    def model(self, name: str) -> ModelInfo:
        """Raises UnknownModelError, naming the served models."""
        return self.engine.model(name)

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by rank and kind, as the workers last reported them."""
        return self.engine.memory_bytes()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def steps_since(self, moment_s: float) -> list[StepSpan]:
        """Steps that ended after `moment_s` of the engine's clock, as far back as they are kept."""
        return self.engine.steps_since(moment_s)

    def check(self) -> None:
        """Raises WorkerLostError if the engine thread has failed and ShuttingDownError if it is closing."""
        self.engine.check()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` to end, end the rest with an error, stop the workers."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.engine.close(drain_s=drain_s))


class RequestStream:
    """The outputs of one accepted request, in order. One consumer; also an async context manager."""

    def __init__(self, engine: "Engine", request: GenerationRequest, office: "_PostOffice") -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._mailbox = _Mailbox(office)
        self._unfinished = request.n
        self._ended = True  # until accepted, so that a refusal leaves nothing to abort
        engine.submit(request, self._mailbox.take, office.flush)
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._mailbox.outputs:
            if self._ended:
                raise StopAsyncIteration
            try:
                await self._mailbox.wait()
            except asyncio.CancelledError:
                self.abort()
                raise
        output = self._mailbox.outputs.popleft()
        if output.finish_reason is not None:
            self._unfinished -= 1
            self._ended = self._ended or self._unfinished == 0
        return output

    async def take(self, timeout_s: float | None = None) -> list[RequestOutput] | None:
        """Every output that is here, waiting for one; [] when `timeout_s` passes first, None after the last."""
        outputs = self._mailbox.outputs
        if not outputs:
            if self._ended:
                return None
            try:
                await self._mailbox.wait(timeout_s)
            except asyncio.CancelledError:
                self.abort()
                raise
        found = [outputs.popleft() for _ in range(len(outputs))]
        self._unfinished -= sum(output.finish_reason is not None for output in found)
        self._ended = self._ended or self._unfinished == 0
        return found

    def abort(self) -> None:
        """End the request; the outputs that are already here stay readable."""
        if not self._ended:
            self._ended = True
            self._engine.abort(self.request_id)

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self.abort()


class _PostOffice:
    """Wakes one event loop from the engine thread: once for a step's outputs, since each wake is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.filled: deque[_Mailbox] = deque()
        self._is_woken = False

    def flush(self) -> None:
        """Called on the engine thread. A loop that has been closed has no reader left, so its outputs are dropped."""
        if not self._is_woken and not self.loop.is_closed():
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # closed since the line before
                self.loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        self._is_woken = False  # before looking, so that what comes meanwhile wakes again
        for _ in range(min(WAKES_A_TURN, len(self.filled))):
            self.filled.popleft().wake()
        if self.filled:
            self.loop.call_soon(self._wake_readers)


class _Mailbox:
    """Carries a request's outputs from the engine thread to the loop. The engine holds this, not the stream: a stream
    that nobody holds is collected and aborts its request.
    """

    def __init__(self, office: _PostOffice) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self._office = office
        self._waiter: asyncio.Future[None] | None = None

    def take(self, output: RequestOutput) -> None:
        """Called on the engine thread."""
        self.outputs.append(output)
        self._office.filled.append(self)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return once `outputs` holds something, `timeout_s` has passed, or after a spurious wake."""
        self._waiter = self._office.loop.create_future()
        alarm = None if timeout_s is None else self._office.loop.call_later(timeout_s, self.wake)
        try:
            if not self.outputs:
                await self._waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()


async def _result(future: "Future[T]") -> T:
    return await asyncio.wrap_future(future)
