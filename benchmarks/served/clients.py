"""Streams of the openai client against a served process, and when their words came."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.served.process import PORT


@dataclass
class Answer:
    """What a stream gave: words (one a token), and when each came (time.perf_counter)."""

    model: str
    prompt_tokens: int
    begin: float
    words: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return (self.moments[0] - self.begin) * 1e3

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        inside = [moment for moment in self.moments if begin <= moment <= end]
        return [1e3 * (b - a) for a, b in pairwise(inside)]


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 100_000, size=tokens).tolist()  # type: ignore[no-any-return]


class Clients:
    def __init__(self) -> None:
        import openai  # needs no GPU, but is not everywhere

        self.last_word: dict[str, float] = {}

        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=200
        )

    async def close(self) -> None:
        await self._client.close()

    async def ask(
        self, model: str, seed: int, prompt_tokens: int, max_tokens: int, shown: list[Answer] | None = None
    ) -> Answer:
        """One streamed completion. A refusal with Retry-After is asked again; an error ends the answer.

        shown: gets the answer at once, and so what a cancelled one had come to.
        """
        ids = prompt(seed, prompt_tokens)
        answer = Answer(model, prompt_tokens, time.perf_counter())
        if shown is not None:
            shown.append(answer)
        while True:
            try:
                stream = await self._client.completions.create(
                    model=model,
                    prompt="",  # the client walks over ids one by one for 15 us each
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True, "prompt": ids},
                )
                async for chunk in stream:
                    words = chunk.choices[0].text.split() if chunk.choices else []
                    answer.words += words
                    answer.moments += [time.perf_counter()] * len(words)
                    if words:
                        self.last_word[model] = answer.moments[-1]
                return answer
            except Exception as failure:
                if getattr(failure, "status_code", 0) in (429, 503) and not answer.words:
                    await asyncio.sleep(0.5)
                    continue
                answer.error = f"{type(failure).__name__}: {failure}"
                return answer

    async def likely(self, model: str, prompt_ids: Sequence[int]) -> dict[str, float]:
        """The likeliest words after a prompt, with the logarithms of their probabilities."""
        reply = await self._client.completions.create(
            model=model,
            prompt="",
            max_tokens=1,
            temperature=0,
            logprobs=5,
            extra_body={"ignore_eos": True, "prompt": list(prompt_ids)},
        )
        found = reply.choices[0].logprobs
        assert found is not None, reply
        assert found.top_logprobs is not None, reply
        return {word.strip(): value for word, value in found.top_logprobs[0].items()}


def plans(names: Sequence[str], count: int, max_tokens: int) -> Iterator[tuple[str, int, int, int]]:
    """(model, seed, prompt tokens, answer tokens) of `count` requests: models in turn, and lengths in turn for each."""
    sizes = (20, 700, 30, 3000, 28, 1500)
    for number in range(count):
        yield names[number % len(names)], 1000 + number, sizes[(number // len(names)) % len(sizes)], max_tokens


class ClientApart:
    """One client in a process of its own: writing 32K ids takes it 5 ms, which other streams must not see."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    async def ask(self, model: str, seed: int, prompt_tokens: int, max_tokens: int) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._process, _ask_once, model, seed, prompt_tokens, max_tokens)

    def close(self) -> None:
        self._process.shutdown()


def _ask_once(model: str, seed: int, prompt_tokens: int, max_tokens: int) -> Answer:
    async def once() -> Answer:
        clients = Clients()
        try:
            return await clients.ask(model, seed, prompt_tokens, max_tokens)
        finally:
            await clients.close()

    return asyncio.run(once())
