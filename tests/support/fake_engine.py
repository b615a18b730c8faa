"""A scripted engine with AsyncEngine's face: no models, no threads; what it says, when, and how it fails is set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosspool.core import FinishReason, TokenLogprob
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.output import RequestOutput, Timings, TokenLogprobs, Usage
from crosspool.engine.request import GenerationRequest
from crosspool.engine.served_model import ServedModel
from crosspool.engine.stats import (
    EngineStats,
    LaneStats,
    ModelInfo,
    ModelState,
    ModelStats,
    PoolStats,
    RankFrames,
    StepTotals,
)
from crosspool.engine.step_log import StepSpan
from crosspool.errors import CrossPoolError, QueueFullError, UnknownModelError

WORDS = ("One", " two", " three", " four", " five", " six", " seven", " eight")


@dataclass
class Script:
    """What every request of a model gets. `words` repeat until max_tokens (or once, with `once`)."""

    words: Sequence[str] = WORDS
    once: bool = False  # end with STOP after the last word
    token_ids: Sequence[int] = ()  # of the words; default 10, 11, ...
    delay_s: float = 0.0  # before every token
    first_delay_s: float = 0.0
    logprob: float = -0.5
    refusal: Exception | None = None  # raised by generate
    fail_after: int | None = None  # tokens, then an ERROR output
    error: CrossPoolError = field(default_factory=lambda: CrossPoolError("the step failed (scripted)"))
    cached_tokens: int = 0


class FakeEngine:
    """Engine state is what tests look at: `requests`, `aborted`, `running`."""

    def __init__(self, models: Sequence[str] = ("tiny",), *, context_limit: int = 1024, max_queue: int = 64) -> None:
        self.scripts = {name: Script() for name in models}
        self.states: dict[str, ModelState] = {name: "ready" for name in models}
        self.context_limit = context_limit
        self.max_queue = max_queue
        self.max_sequences: int | None = None
        self.requests: list[GenerationRequest] = []
        self.running: dict[str, FakeStream] = {}
        self.aborted: list[str] = []
        self.finished: dict[str, dict[str, int]] = {name: {} for name in models}
        self.failure: CrossPoolError | None = None
        self.busy_for_s: float | None = None
        self.ranks_down: dict[str, float] = {}
        self.steps: list[StepSpan] = []
        self.lanes: tuple[LaneStats, ...] = ()
        self.loaded = asyncio.Event()  # cleared by a test, it holds up loads
        self.loaded.set()
        self.load_error: CrossPoolError | None = None
        self.limit_changes: list[LimitChange] = []
        self.limit_error: Exception | None = None

    def generate(self, request: GenerationRequest) -> FakeStream:
        script = self.scripts.get(request.model)
        if script is None or self.states[request.model] != "ready":
            raise UnknownModelError(f"model {request.model} is not ready")
        if script.refusal is not None:
            raise script.refusal
        if len(self.running) >= self.max_queue:
            raise QueueFullError(f"the queue of {request.model} is full", retry_after_s=2.0)
        self.requests.append(request)
        stream = FakeStream(self, request, script)
        self.running[request.request_id] = stream
        return stream

    async def add_model(self, model: ServedModel) -> ModelInfo:
        if model.name in self.scripts:
            raise ValueError(f"model {model.name} is already {self.states[model.name]}")
        self.scripts[model.name], self.states[model.name], self.finished[model.name] = Script(), "loading", {}
        await self.loaded.wait()
        if self.load_error is not None:
            self.states[model.name] = "failed"
            raise self.load_error
        self.states[model.name] = "ready"
        return self.model(model.name)

    async def remove_model(self, name: str, *, drain: bool = True) -> None:
        if name not in self.scripts:
            raise UnknownModelError(f"no model {name}")
        if self.states[name] == "loading":
            raise ValueError(f"model {name} is still loading")
        self.states[name] = "draining"
        while drain and any(stream.request.model == name for stream in self.running.values()):
            await asyncio.sleep(0.01)
        del self.scripts[name], self.states[name]

    def trim(self, model: str) -> int:
        return 6 if model in self.scripts else 0

    def set_limits(self, change: LimitChange) -> None:
        if self.limit_error is not None:
            raise self.limit_error
        self.limit_changes.append(change)

    def models(self) -> list[ModelInfo]:
        return [self.model(name) for name in self.scripts]

    def model(self, name: str) -> ModelInfo:
        if name not in self.scripts:
            raise UnknownModelError(f"no model {name}")
        return ModelInfo(
            name=name,
            state=self.states[name],
            context_limit=self.context_limit,
            created_s=1_700_000_000.0,
            kv_rank="kv0",
            weights_ranks=("w0",),
            kv_bytes_per_token=128,
            max_sequences=self.max_sequences,
            loaded_bytes=300,
            total_bytes=300,
            bytes_by_rank={"kv0": 100, "w0": 200},
            load_s=0.5,
            moved_bytes=300,
            experts_by_layer=(0, 2),
        )

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def steps_since(self, moment_s: float) -> list[StepSpan]:
        return [span for span in self.steps if span.ended_s > moment_s]

    def stats(self) -> EngineStats:
        now = time.monotonic()
        models = tuple(
            ModelStats(
                name=name,
                num_queued=0,
                num_prefilling=0,
                num_decoding=sum(stream.request.model == name for stream in self.running.values()),
                num_parked=0,
                pages_used=2,
                pages_reserved=1,
                frames_used=4,
                frames_reserved=2,
                page_tokens=16,
                frames_per_page=2,
                pages_reusable=3,
                frames_reusable=6,
                prefix_queries=40,
                prefix_hits=32,
                prefix_evictions=5,
                prompt_tokens=7,
                generated_tokens=9,
                num_accepted=len(self.requests),
                num_refused=0,
                num_finished=self.finished[name],
                frames_by_rank={"kv0": RankFrames(used=4, reserved=2, reusable=6)},
                steps={
                    "decode": StepTotals(
                        num_steps=8, num_tokens=9, num_told=4, attention_s=0.5, ffn_s=0.25, transfer_s=0.125
                    )
                },
            )
            for name in self.scripts
        )
        used, reserved, reusable = 4 * len(models), 2 * len(models), 6 * len(models)
        return EngineStats(
            now_s=now,
            models=models,
            pools=(
                PoolStats(
                    kv_rank="kv0",
                    frame_bytes=4096,
                    frames_budget=100,
                    frames_used=used,
                    frames_reserved=reserved,
                    frames_reusable=reusable,
                    frames_free=100 - used - reserved - reusable,
                ),
            ),
            lanes=self.lanes,
            num_steps=3,
            num_replays=0,
            num_ranks_lost=0,
            last_step_s=None,
            busy_since_s=None if self.busy_for_s is None else now - self.busy_for_s,
            ranks_down={rank: now - down_s for rank, down_s in self.ranks_down.items()},
        )


class FakeStream:
    """Walks the script for every one of the request's n sequences in turn."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, script: Script) -> None:
        self.request = request
        self._engine = engine
        self._script = script
        self._produced = 0
        self._arrival_s = time.monotonic()
        self._first_s: float | None = None
        self._due_s: float | None = None  # of the next token
        self._live = set(range(request.n))

    async def take(self, timeout_s: float | None = None) -> list[RequestOutput] | None:
        if not self._live:
            self._engine.running.pop(self.request.request_id, None)
            return None
        if self._due_s is None:
            delay_s = self._script.delay_s + (0 if self._produced else self._script.first_delay_s)
            self._due_s = time.monotonic() + delay_s
        wait_s = self._due_s - time.monotonic()
        try:
            if timeout_s is not None and timeout_s < wait_s:
                await asyncio.sleep(timeout_s)
                return []
            await asyncio.sleep(max(0.0, wait_s))
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._due_s = None
        outputs = self._step()
        if not self._live:
            self._engine.running.pop(self.request.request_id, None)
        return outputs

    async def aclose(self) -> None:
        if self._engine.running.pop(self.request.request_id, None) is not None:
            self._engine.aborted.append(self.request.request_id)
            self._count("abort")

    def _step(self) -> list[RequestOutput]:
        """One token for each live sequence."""
        now = time.monotonic()
        self._first_s = self._first_s or now
        self._produced += 1
        outputs = []
        for index in sorted(self._live):
            reason = self._reason()
            if reason is not None:
                self._live.discard(index)
                self._count(str(reason))
            outputs.append(self._output(index, reason, now))
        return outputs

    def _reason(self) -> FinishReason | None:
        script = self._script
        if script.fail_after is not None and self._produced > script.fail_after:
            return FinishReason.ERROR
        if script.once and self._produced >= len(script.words):
            return FinishReason.STOP
        if self._produced >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _output(self, index: int, reason: FinishReason | None, now: float) -> RequestOutput:
        script, sampling = self._script, self.request.sampling
        failed = reason is FinishReason.ERROR
        place = (self._produced - 1) % len(script.words)
        token_id = script.token_ids[place] if script.token_ids else 10 + place
        logprobs = None
        if sampling.num_logprobs is not None:
            top = tuple(TokenLogprob(token_id + rank, script.logprob - rank) for rank in range(sampling.num_logprobs))
            logprobs = () if failed else (TokenLogprobs(token_id, script.logprob, top),)
        return RequestOutput(
            request_id=self.request.request_id,
            index=index,
            text="" if failed else script.words[place],
            token_ids=() if failed else (token_id,),
            token_times_s=() if failed else (now,),
            logprobs=logprobs,
            usage=Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=self._produced - failed,
                cached_tokens=script.cached_tokens,
            ),
            timings=Timings(
                arrival_s=self._arrival_s, scheduled_s=self._arrival_s, first_token_s=self._first_s, last_token_s=now
            ),
            finish_reason=reason,
            stop_reason=None,
            error=script.error if failed else None,
        )

    def _count(self, reason: str) -> None:
        counts = self._engine.finished[self.request.model]
        counts[reason] = counts.get(reason, 0) + 1


def say(text: str) -> Callable[[FakeEngine], None]:
    """Script every model to say `text`, one token for each word, and stop."""
    words = [part for part in text.replace(" ", "\0 ").split("\0") if part]

    def apply(engine: FakeEngine) -> None:
        for name in engine.scripts:
            engine.scripts[name] = Script(words=words, once=True)

    return apply
