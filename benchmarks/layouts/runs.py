"""What is measured of one served layout, as files that a later call finds again: load, one request alone, memory.

A run that was broken off leaves what had ended; the next one with the same folder goes on behind it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import describe_commit, describe_hardware, installed_versions
from crosspool.backends.cuda.steps.passes import BUCKETS
from crosspool.bench.run import run
from crosspool.bench.settings import BenchSettings

POLL_S = 0.5
TOGETHER = 24
"""Requests of each model at once before the clock runs: larger batches meet the kernels that were not prepared."""


class Runs:
    """Results by name in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> dict[str, Any] | None:
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def load(self, layout: str, rate: str) -> dict[str, Any] | None:
        """The layout's load at a rate: with the whole trace, or the longest part of it."""
        whole = self.find(f"load_{layout}_{rate}")
        parts = [json.loads(path.read_text()) for path in self._folder.glob(f"load_{layout}_{rate}_*s.json")]
        return whole or max(parts, key=lambda part: part["duration"], default=None)

    def machines(self) -> list[dict[str, Any]]:
        """Where each measurement was taken, the newest last."""
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        found = [json.loads(path.read_text(encoding="utf-8")).get("machine") for path in paths]
        return [machine for machine in found if machine is not None]

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured under the name, now or before."""
        found = self.find(name)
        if found is None:
            found = {**measure(), "machine": machine()}
            (self._folder / f"{name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        return found


def machine() -> dict[str, Any]:
    """Where a run took place, and what it ran on that figures depend on and no result tells: rows of passes."""
    facts = {**describe_hardware(), "gpus": [name for name, _, _ in gpu_memory()]}
    return {
        "hardware": facts,
        "versions": installed_versions(),
        "commit": describe_commit(),
        "start": _start_of_machine(),
        "pass_rows": BUCKETS,
    }


def _start_of_machine() -> str | None:
    """Tells one start of a machine from the next: figures compare well only within one. None where nothing tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def gpu_memory() -> list[tuple[str, int, int]]:
    """(name, bytes in use, bytes) of each GPU; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in text.strip().splitlines()]
    return [(name, int(used) << 20, int(total) << 20) for name, used, total in rows]


def warm_up_together(url: str, models: Sequence[str], seed: int) -> None:
    """Every model at once, at batches of all sizes."""
    settings = BenchSettings(
        base_url=(url,),
        models=tuple(models),
        num_prompts=TOGETHER,
        input_len=("200~0.8",),
        output_len=("60~0.5",),
        seed=seed + 1,
        temperature=1.0,
    )
    run(settings, console=Console(file=StringIO()))


def loaded(settings: BenchSettings, label: str) -> dict[str, Any]:
    """The load of `settings`, with what the server held meanwhile. Prints its figures under `label`."""
    told = StringIO()
    with watching(settings.base_url[0]) as samples:
        result = run(settings, console=Console(file=told, width=110))
    print(f"== {label}\n{told.getvalue()}", flush=True)
    result["kv_samples"] = samples
    return result


@contextmanager
def watching(url: str) -> Iterator[list[dict[str, Any]]]:
    """Samples of what the KV ranks hold: the time (time.monotonic), and bytes used by rank."""
    samples: list[dict[str, Any]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_S):
            with suppress(OSError, ValueError):
                with urllib.request.urlopen(f"{url}/stats", timeout=5) as answer:
                    stats = json.load(answer)
                pools = {pool["kv_rank"]: pool["frames_used"] * pool["frame_bytes"] for pool in stats["pools"]}
                samples.append({"at_s": time.monotonic(), "used_bytes": pools})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join(10)


def greedy_words(url: str, model: str, vocabulary: int = 90_000) -> list[list[str]]:
    """Answers to a short prompt and to one that runs in pieces."""
    answers = []
    for tokens in (20, 600):
        prompt = [10 + 11 * number % (vocabulary - 10) for number in range(tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            answers.append(json.load(answer)["choices"][0]["text"].split())
    return answers


def alone_ms(url: str, model: str, prompt_tokens: int, tokens: int, vocabulary: int = 90_000) -> list[float]:
    """Times between the tokens of one request, nothing else being served."""
    body = {
        "model": model,
        "prompt": [10 + 7 * number % (vocabulary - 10) for number in range(prompt_tokens)],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 1,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    moments = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in pairwise(moments)]
