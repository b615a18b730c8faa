"""Front ends over the tiny tokenizer, and HTTP helpers, for the server's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from crosspool.config import ServerConfig
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue, ModelFrontend, SamplingDefaults
from crosspool.server.chat import load_chat_template
from crosspool.server.tokenizer import TextTokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_tokenizer import write_tiny_tokenizer

VOCAB_SIZE = 512  # the tokenizer knows fewer: the rest is padding of the output layer


def tiny_frontend(
    directory: Path,
    name: str = "tiny",
    *,
    aliases: tuple[str, ...] = (),
    defaults: SamplingDefaults | None = None,
    config: dict[str, Any] | None = None,
) -> ModelFrontend:
    """A model's front end; `config` overrides entries of tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(directory)
    if config:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    tokenizer = TextTokenizer.from_directory(directory)
    return ModelFrontend(
        name=name,
        vocab_size=VOCAB_SIZE,
        tokenizer=tokenizer,
        template=load_chat_template(directory, tokenizer),
        defaults=defaults or SamplingDefaults(),
        aliases=aliases,
        source=str(directory),
        eos_token_ids=(0,),
    )


def fake_app(engine: FakeEngine, directory: Path, **settings: Any) -> FastAPI:
    """The server over a fake engine. The first model also answers as `nickname`."""
    names = list(engine.scripts)
    frontends = [
        tiny_frontend(directory / name, name, aliases=("nickname",) if name == names[0] else ()) for name in names
    ]
    return create_app(engine, Catalogue(frontends), ServerConfig(**settings))


def events(text: str) -> list[Any]:
    """The data of every server-sent event, parsed; `[DONE]` stays a string."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


def connect(app: FastAPI, root_path: str = "") -> httpx2.AsyncClient:
    """A client of `app` in this process. NOTE: it hands over whole answers; streams need `live_server`."""
    transport = httpx2.ASGITransport(app=app, root_path=root_path, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://server")
