"""Where requests go and what is in them: token ids, or text of a wanted number of tokens."""

import json
import random
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from crosspool.bench.traffic import PlannedRequest

WORDS = ("the", "sea", "was", "calm", "and", "ship", "went", "on", "under", "stars", "a", "captain", "looked", "at")


@lru_cache(maxsize=8)
def read_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json`, or the one of a model directory. Raises ValueError where there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for missing and for damaged files
        raise ValueError(f"--tokenizer is {path}, and {file} cannot be read: {error}; give a model directory") from None


def some_words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num))


def text_of(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> str:
    """Common words, cut after so many tokens; a chat template comes on top of them."""
    text = some_words(rng, num_tokens)
    while len(encoding := tokenizer.encode(text, add_special_tokens=False)) < num_tokens:
        text = f"{text} {some_words(rng, num_tokens)}"
    return text[: encoding.offsets[num_tokens - 1][1]]


ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One OpenAI-compatible endpoint.

    `/v1/completions` gets token ids, drawn from [10, vocab_size), so prompts have exactly the tokens asked for and no
    two begin alike; `/v1/chat/completions` gets as many common words, and the server says how many tokens they were.
    With a tokenizer these make as many tokens, and ids are drawn from all of its vocabulary.
    extra_body: fields of every request. Raises ValueError for an address that is none, and for no tokenizer.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = True
    temperature: float | None = None
    vocab_size: int = 1000
    tokenizer: Path | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base-url is {self.base_url!r}; it must be like http://localhost:8000")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint is {self.endpoint!r}; it must be one of {', '.join(ENDPOINTS)}")
        if self.vocab_size <= 10:
            raise ValueError(f"vocab-size is {self.vocab_size}; it must be above 10")
        if self.tokenizer is not None:
            read_tokenizer(self.tokenizer)  # refused now rather than at the first request

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.base_url).scheme == "https"

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.base_url).port or (443 if self.is_tls else 80)

    def address(self) -> str:
        """The host's IP address, looked up once: a look-up for each request would be part of what is measured."""
        try:
            return str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ValueError(f"base-url names {self.host!r}, which is not found ({error.strerror})") from None

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_tls else None

    def request(self, planned: PlannedRequest) -> bytes:
        """The whole HTTP request."""
        path = urlsplit(self.base_url).path.rstrip("/").removesuffix("/v1") + self.endpoint
        body = json.dumps(self.body(planned)).encode()
        lines = [f"POST {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", "Accept: text/event-stream", "Connection: close"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def body(self, planned: PlannedRequest) -> dict[str, Any]:
        rng = random.Random(f"{self.seed}/{planned.index}/{planned.model}")
        body: dict[str, Any] = {"model": planned.model, "max_tokens": planned.output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == ENDPOINTS[0]:
            stop = self.vocab_size if self.tokenizer is None else read_tokenizer(self.tokenizer).get_vocab_size()
            body["prompt"] = [rng.randrange(10, stop) for _ in range(planned.prompt_tokens)]
        else:
            num = planned.prompt_tokens
            text = some_words(rng, num) if self.tokenizer is None else text_of(read_tokenizer(self.tokenizer), rng, num)
            body["messages"] = [{"role": "user", "content": text}]
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return {**body, **self.extra_body}
