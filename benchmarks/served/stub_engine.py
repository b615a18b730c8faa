"""An engine without models: every sequence gets the same words at a set pace. For the cost of the server alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from crosspool.core import FinishReason
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.output import RequestOutput, Timings, Usage
from crosspool.engine.request import GenerationRequest
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.engine.step_log import StepSpan
from crosspool.server.engine_client import OutputStream

if TYPE_CHECKING:
    from crosspool.engine.engine import Engine

WORDS = (" the", " sea", " was", " calm", " and", " the", " ship", " went", " on")
FAST = "fast"


class StubEngine:
    """`EngineClient` of two models: `fast` gives a token at each turn of the event loop, `paced` one each `pace_s`.

    `paced` goes through the real `AsyncEngine`, from a thread of its own.
    """

    def __init__(self, pace_s: float) -> None:
        self._paced = AsyncEngine(cast("Engine", PacedEngine(pace_s)))

    def generate(self, request: GenerationRequest) -> OutputStream:
        return LoopStream(request) if request.model == FAST else self._paced.generate(request)

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Nothing to stop: the thread ends with the process."""

    async def add_model(self, model: ServedModel) -> ModelInfo:
        raise NotImplementedError("the stub has its two models only")

    async def remove_model(self, name: str, *, drain: bool = True) -> None:
        raise NotImplementedError("the stub has its two models only")

    def set_limits(self, change: LimitChange) -> None:
        raise NotImplementedError("the stub has no KV pool")

    def trim(self, model: str) -> int:
        raise NotImplementedError("the stub has no KV pool")

    def models(self) -> list[ModelInfo]:
        return [self.model(FAST), self.model("paced")]

    def model(self, name: str) -> ModelInfo:
        return ModelInfo(
            name=name,
            state="ready",
            context_limit=1_000_000,
            created_s=0.0,
            kv_rank="kv0",
            weights_ranks=("w0",),
            kv_bytes_per_token=1,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            now_s=time.monotonic(),
            models=(),
            pools=(),
            lanes=(),
            num_steps=0,
            num_replays=0,
            num_ranks_lost=0,
            last_step_s=None,
            busy_since_s=None,
            ranks_down={},
        )

    def steps_since(self, moment_s: float) -> list[StepSpan]:
        return []

    def check(self) -> None:
        """It never fails."""


class LoopStream:
    """Outputs of one request of `fast`: one at each turn of the event loop, the first at once."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._made = 0
        self._arrival_s = time.monotonic()

    async def take(self, timeout_s: float | None = None) -> list[RequestOutput] | None:
        if self._made == self._request.sampling.max_tokens:
            return None
        await asyncio.sleep(0)
        self._made += 1
        is_last = self._made == self._request.sampling.max_tokens
        return [stub_output(self._request, self._made, self._arrival_s, is_last=is_last)]

    async def aclose(self) -> None:
        self._made = self._request.sampling.max_tokens


class PacedEngine:
    """The engine beneath `AsyncEngine`: a thread gives every request one token each `pace_s`, all at the same moment,
    as a decode step of all of them would.

    Since the engine is to cost nothing, a step makes one output and gives it to every request that does not end with
    it: what that tells of usage and times is that of the engine's first request.
    """

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._live: dict[str, PacedRequest] = {}
        self._thread: threading.Thread | None = None

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestOutput], None], flush: Callable[[], None]
    ) -> None:
        self._live[request.request_id] = PacedRequest(request, take, flush, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(request,), name="paced engine", daemon=True)
            self._thread.start()

    def abort(self, request_id: str) -> bool:
        return self._live.pop(request_id, None) is not None

    def _run(self, first: GenerationRequest) -> None:
        due_s = arrival_s = time.monotonic()
        for step in itertools.count(1):
            due_s += self._pace_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            output = stub_output(first, step, arrival_s, is_last=False)
            flush = None
            for asked in list(self._live.values()):
                asked.made += 1
                if asked.made == asked.request.sampling.max_tokens:
                    self._live.pop(asked.request.request_id, None)
                    asked.take(stub_output(asked.request, asked.made, asked.arrival_s, is_last=True))
                else:
                    asked.take(output)
                flush = asked.flush
            if flush is not None:
                flush()


@dataclass(slots=True)
class PacedRequest:
    """A request that gets tokens, and where they go."""

    request: GenerationRequest
    take: Callable[[RequestOutput], None]
    flush: Callable[[], None]
    arrival_s: float
    made: int = 0


def stub_output(request: GenerationRequest, made: int, arrival_s: float, *, is_last: bool) -> RequestOutput:
    """The output with a request's token number `made`, from 1."""
    now = time.monotonic()
    return RequestOutput(
        request_id=request.request_id,
        index=0,
        text=WORDS[made % len(WORDS)],
        token_ids=(7,),
        token_times_s=(now,),
        logprobs=None,
        usage=Usage(prompt_tokens=1, completion_tokens=made, cached_tokens=0),
        timings=Timings(arrival_s=arrival_s, scheduled_s=arrival_s, first_token_s=now, last_token_s=now),
        finish_reason=FinishReason.LENGTH if is_last else None,
        stop_reason=None,
        error=None,
    )
