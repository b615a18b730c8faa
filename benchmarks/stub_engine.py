"""An engine without models: every sequence gets the same words at a set pace. For the cost of the server alone."""

from __future__ import annotations

import asyncio
import time

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput, Timings, Usage
from crosspool.engine.request import GenerationRequest
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.engine.step_log import StepSpan

WORDS = (" the", " sea", " was", " calm", " and", " the", " ship", " went", " on")
FAST = "fast"


class StubEngine:
    """`EngineClient` of two models: `fast` gives a token at each turn of the event loop, `paced` one each `pace_s`."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    def generate(self, request: GenerationRequest) -> StubStream:
        return StubStream(request, 0.0 if request.model == FAST else self._pace_s)

    async def add_model(self, model: ServedModel) -> ModelInfo:
        raise NotImplementedError("the stub has its two models only")

    async def remove_model(self, name: str, *, drain: bool = True) -> None:
        raise NotImplementedError("the stub has its two models only")

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


class StubStream:
    """Outputs of one request. The first token comes at once."""

    def __init__(self, request: GenerationRequest, pace_s: float) -> None:
        self._request = request
        self._pace_s = pace_s
        self._made = 0
        self._arrival_s = self._due_s = time.monotonic()

    def __aiter__(self) -> StubStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._made == self._request.sampling.max_tokens:
            raise StopAsyncIteration
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()) if self._made else 0.0)
        self._due_s += self._pace_s
        self._made += 1
        now = time.monotonic()
        is_last = self._made == self._request.sampling.max_tokens
        return RequestOutput(
            request_id=self._request.request_id,
            index=0,
            text=WORDS[self._made % len(WORDS)],
            token_ids=(7,),
            token_times_s=(now,),
            logprobs=None,
            usage=Usage(prompt_tokens=1, completion_tokens=self._made, cached_tokens=0),
            timings=Timings(
                arrival_s=self._arrival_s, scheduled_s=self._arrival_s, first_token_s=now, last_token_s=now
            ),
            finish_reason=FinishReason.LENGTH if is_last else None,
            stop_reason=None,
            error=None,
        )

    async def aclose(self) -> None:
        self._made = self._request.sampling.max_tokens
