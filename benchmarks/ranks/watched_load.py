"""Streams of one engine with the moment of every token, and the processor time that ranks take meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crosspool.core import SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.request import GenerationRequest

PROMPT_TOKENS = 24
UNSTEADY_TOKENS = 24
"""Of a lone stream, before its processor time is looked at: its prompt, and steps before its first run."""


@dataclass
class Stream:
    """One answer's tokens, and when each of them came."""

    model: str
    moments: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def tokens_between(self, begin_s: float, end_s: float) -> int:
        return sum(begin_s < moment <= end_s for moment in self.moments)


@dataclass
class Load:
    """Sends requests to one engine; `seed` tells their prompts apart."""

    engine: AsyncEngine
    count: int = 0

    async def ask(self, stream: Stream, max_tokens: int, watch: WatchedCPU | None = None) -> Stream:
        self.count += 1
        prompt = tuple((31 * self.count + 7 * position) % 500 + 1 for position in range(PROMPT_TOKENS))
        request = GenerationRequest(
            request_id=f"r{self.count}",
            model=stream.model,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            seed=self.count,
        )
        async for output in self.engine.generate(request):
            if output.error is not None:
                raise output.error
            stream.moments += [time.perf_counter()] * len(output.token_ids)
            stream.tokens += output.token_ids
            if watch is not None and len(stream.tokens) >= UNSTEADY_TOKENS:
                watch.look(len(stream.tokens))
        return stream

    async def together(self, names: Sequence[str], max_tokens: int) -> list[Stream]:
        return list(await asyncio.gather(*(self.ask(Stream(name), max_tokens) for name in names)))


def window_rate(streams: Sequence[Stream]) -> tuple[float, float, float]:
    """Tokens/s while every stream decodes, and that window: from the last first token to the first last one."""
    begin_s, end_s = max(stream.moments[0] for stream in streams), min(stream.moments[-1] for stream in streams)
    tokens = sum(stream.tokens_between(begin_s, end_s) for stream in streams)
    return tokens / (end_s - begin_s), begin_s, end_s


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, by the clock that Linux keeps of it."""
    return time.clock_gettime(~pid << 3 | 2)


class WatchedCPU:
    """Processor time of ranks' processes between the first look and the last one."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._looks: list[tuple[float, dict[str, float], int]] = []

    def look(self, num_tokens: int = 0) -> None:
        used = {rank: cpu_s(pid) for rank, pid in self._pids.items()}
        self._looks = [*self._looks[:1], (time.perf_counter(), used, num_tokens)]

    @property
    def share(self) -> float:
        """Processor seconds over seconds passed."""
        (begin_s, begin, _), (end_s, end, _) = self._looks
        return (sum(end.values()) - sum(begin.values())) / (end_s - begin_s)

    @property
    def us_per_token(self) -> dict[str, float]:
        """By rank."""
        (_, begin, first), (_, end, last) = self._looks
        return {rank: 1e6 * (end[rank] - begin[rank]) / (last - first) for rank in self._pids}


async def arrivals(load: Load, names: Sequence[str], rate: float, seconds: float, max_tokens: int, seed: int) -> float:
    """Poisson arrivals of every model; tokens/s of decode while any request is under way."""
    rng, tasks = np.random.default_rng(seed), []
    moments = sorted((t, name) for name in names for t in arrival_times(rng, rate, seconds))
    start_s = time.perf_counter()
    for moment_s, name in moments:
        await asyncio.sleep(max(0.0, start_s + moment_s - time.perf_counter()))
        length = int(rng.integers(max_tokens // 2, max_tokens + 1))
        tasks.append(asyncio.create_task(load.ask(Stream(name), length)))
    streams = [await task for task in tasks]
    spans = sorted((stream.moments[0], stream.moments[-1]) for stream in streams)
    busy_s, until_s = 0.0, 0.0
    for begin_s, end_s in spans:
        busy_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return sum(len(stream.moments) - 1 for stream in streams) / busy_s


def arrival_times(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    times = np.cumsum(rng.exponential(1 / rate, size=int(4 * rate * seconds) + 8))
    return [float(moment) for moment in times if moment < seconds]
