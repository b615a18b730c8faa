"""`crosspool serve --kv-ranks 2` with the demo models, asked through the openai client while a KV rank is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import openai
import psutil
import pytest

from tests.support.server_log import ServerLog

MAX_TOKENS = 40


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A ready server of the demo models, and its URL."""
    command = [sys.executable, "-m", "crosspool", "serve", "--port", "0", "--kv-pool-bytes", "16MiB"]
    command += ["--frame-bytes", "256KiB", "--max-model-len", "512", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = ServerLog(process)
    try:
        yield process, log.url()
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def answers(url: str, names: list[str]) -> dict[str, str]:
    """One greedy completion of every model for each of two prompts, all at once."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(name: str, prompt: str) -> str:
        answer = client.completions.create(model=name, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
        return answer.choices[0].text

    prompts = ["It was the best of times, ", "My dear Watson, " * 12]
    with ThreadPoolExecutor(len(prompts) * len(names)) as pool:
        asked = {f"{name} {n}": pool.submit(ask, name, text) for name in names for n, text in enumerate(prompts)}
        return {key: future.result(timeout=60) for key, future in asked.items()}


def models(url: str) -> dict[str, dict[str, object]]:
    cards = httpx2.get(f"{url}/v1/models").json()["data"]
    return {card["id"]: card["crosspool"] for card in cards}


def rank_process(process: subprocess.Popen[str], rank: str) -> psutil.Process:
    """The child process of a rank, whose command line ends in its name."""
    [found] = [child for child in psutil.Process(process.pid).children() if child.cmdline()[-1] == rank]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    with served("--layout", "inprocess") as (_, url):
        return answers(url, list(models(url)))


def test_two_kv_ranks_answer_as_one_does_though_one_of_them_is_killed(expected: dict[str, str]) -> None:
    with served("--kv-ranks", "2") as (process, url):
        cards = models(url)
        assert {tuple(card["kv_ranks"]) for card in cards.values()} == {("kv0", "kv1"), ("kv1", "kv0")}
        assert {card["kv_split"] for card in cards.values()} == {"heads", "tokens"}
        assert answers(url, list(cards)) == expected
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(answers, url, list(cards))
            time.sleep(0.1)
            rank_process(process, "kv1").kill()
            assert again.result(timeout=60) == expected
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'crosspool:kv_rank_bytes{kv_rank="kv1",model_name=' in metrics


def test_a_split_that_cannot_be_is_one_line() -> None:
    command = [sys.executable, "-m", "crosspool", "serve", "--kv-ranks", "64", "--kv-split", "heads", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "kv_split is heads for" in ended.stderr
    assert "use kv_split tokens or auto" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_several_kv_ranks_on_gpus_are_not_driven_by_the_host() -> None:
    command = [sys.executable, "-m", "crosspool", "serve", "--kv-ranks", "2", "--backend", "cuda", "--port", "0"]
    ended = subprocess.run([*command, "--control", "host"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "control is host with kv_ranks 2, whose exchange is a part of graphs; use graphs" in ended.stderr


def test_a_prefill_step_of_more_passes_than_epochs_is_one_line() -> None:
    command = [sys.executable, "-m", "crosspool", "serve", "--kv-ranks", "2", "--backend", "cuda", "--port", "0"]
    ended = subprocess.run([*command, "--max-num-batched-tokens", "20000"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "max_num_batched_tokens is 20000; over several KV ranks on GPUs a step takes up to" in ended.stderr
