"""A minimal streaming client of the OpenAI chat API that notes when every piece arrived."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx2

from crosspool.demo.scenario import DemoRequest
from crosspool.errors import CrossPoolError


@dataclass(slots=True)
class Answer:
    """One streamed answer as the client saw it. Times are seconds on the client's monotonic clock."""

    request: DemoRequest
    sent_s: float
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time between pieces; a piece is one token unless a character spans several."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


async def stream_chat(
    http: httpx2.AsyncClient, request: DemoRequest, seed: int, on_piece: Callable[[Answer], None]
) -> Answer:
    """Send one request and read its stream to the end. Raises CrossPoolError if the server refuses or fails."""
    body = {
        "model": request.model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "ignore_eos": not request.shown,  # the background load has known lengths; the shown answers end by themselves
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(request, time.monotonic())
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise CrossPoolError(f"{request.model}: HTTP {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _take(answer, json.loads(line[len("data: ") :]))
                on_piece(answer)
    return answer


def _take(answer: Answer, chunk: dict[str, object]) -> None:
    if "error" in chunk:
        raise CrossPoolError(f"{answer.request.model}: {chunk['error']}")
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.num_tokens = usage["completion_tokens"]
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        piece = choice["delta"].get("content")
        if piece:
            answer.text += piece
            answer.arrivals_s.append(time.monotonic())
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
