"""Workers are killed and stopped under load, again and again: no accepted request is lost or changed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.tiny_models import write_tiny_model

FAMILIES = {"a": "qwen3_moe", "b": "deepseek_v2", "c": "glm4_moe_lite"}
NUM_ROUNDS = 20
NUM_REQUESTS = 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("decode_steps", [1, 8])
async def test_20_rounds_of_lost_workers_change_no_answer(tmp_path: Path, decode_steps: int) -> None:
    models = [str(write_tiny_model(tmp_path / name, family)) for name, family in FAMILIES.items()]
    command = [sys.executable, "-m", "crosspool", "serve", *models, "--port", "0", "--log-level", "error"]
    command += ["--frame-bytes", "64KiB", "--kv-pool-bytes", "32MiB", "--max-queue", "300"]
    command += ["--decode-steps", str(decode_steps)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(line.split(" on ")[1].split()[0] for line in server.stderr if " on http://" in line)
    reader = threading.Thread(target=server.stderr.read, daemon=True)
    reader.start()
    try:
        await _storm(server, url)
    finally:
        server.terminate()
        assert server.wait(30) == 0
        reader.join(5)
        server.stderr.close()


async def _storm(server: subprocess.Popen[str], url: str) -> None:
    draw = random.Random(3)
    bodies = [_body(draw) for _ in range(NUM_REQUESTS)]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        undisturbed = await asyncio.gather(*(_text(http, body) for body in bodies))
        for number in range(NUM_ROUNDS):
            answers = [asyncio.create_task(_text(http, body)) for body in bodies]
            await _answered(answers, draw.randrange(NUM_REQUESTS - 10))  # an idle worker that stops is not missed
            workers = {child.cmdline()[-1]: child for child in psutil.Process(server.pid).children(recursive=True)}
            rank, blow = draw.choice(("kv0", "w0")), draw.choice((signal.SIGKILL, signal.SIGSTOP))
            workers[rank].send_signal(blow)
            assert await asyncio.gather(*answers) == undisturbed, f"round {number}: {blow.name} of {rank}"
        stats = (await http.get("/stats")).json()
    assert stats["health"]["status"] == "idle"
    assert [pool["frames_used"] + pool["frames_reserved"] for pool in stats["pools"]] == [0]
    assert stats["num_ranks_lost"] == NUM_ROUNDS


async def _answered(answers: list[asyncio.Task[str]], count: int) -> None:
    """Return while the others still run."""
    await asyncio.sleep(0.05)
    while sum(answer.done() for answer in answers) < count:
        await asyncio.wait([answer for answer in answers if not answer.done()], return_when=asyncio.FIRST_COMPLETED)


def _body(draw: random.Random) -> dict[str, Any]:
    return {
        "model": draw.choice(list(FAMILIES)),
        "prompt": [draw.randrange(5, 260) for _ in range(draw.randrange(1, 80))],
        "max_tokens": draw.randrange(5, 60),
        "ignore_eos": True,
        "temperature": draw.choice((0, 1.0)),
        "seed": draw.randrange(999),
    }


async def _text(http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text
