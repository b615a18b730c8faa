"""Layouts of one deployment, as flags of `crosspool serve`, and a server of one of them in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 300.0
POLL_S = 0.2

LAYOUTS: dict[str, tuple[str, ...]] = {
    "crosspool-1+1": ("--kv-ranks", "1", "--weights-ranks", "1"),
    "crosspool-1+1s": ("--kv-ranks", "1", "--weights-ranks", "2", "--weights-shares", "3,1"),
    "crosspool-1+2": ("--kv-ranks", "1", "--weights-ranks", "2"),
    "crosspool-1+3": ("--kv-ranks", "1", "--weights-ranks", "3"),
    "static-2": ("--baseline", "static", "--kv-ranks", "1", "--weights-ranks", "1"),
    "static-4": ("--baseline", "static", "--kv-ranks", "1", "--weights-ranks", "3"),
    "elastic-2": ("--baseline", "elastic", "--kv-ranks", "1", "--weights-ranks", "1"),
    "elastic-4": ("--baseline", "elastic", "--kv-ranks", "1", "--weights-ranks", "3"),
}
"""The number behind a baseline is that of its places; the two pools of the same flags have as many ranks.
1+1s: a second weights rank, with a quarter of every FFN, lies beside the KV rank (`beside_share`)."""


def num_gpus(layout: str) -> int:
    """By its name, such as crosspool-1+1s or static-2."""
    return sum(int(number) for number in layout.partition("-")[2].partition(".")[0].rstrip("s").split("+"))


GPU_LAYOUTS: dict[str, tuple[str, ...]] = {
    **{name: (*flags, "--gpus", str(num_gpus(name))) for name, flags in LAYOUTS.items()},
    "crosspool-1": ("--kv-ranks", "1", "--weights-ranks", "1", "--gpus", "1"),
    "static-1": ("--baseline", "static", "--gpus", "1"),
    "elastic-1": ("--baseline", "elastic", "--gpus", "1"),
}
"""The same on GPUs, a place each; and both pools, or the only place, on one GPU."""


VARIANTS: dict[str, tuple[str, ...]] = {
    "resident": ("--control", "resident"),
    "chunk2k": ("--max-num-batched-tokens", "2048"),
    "2lanes": ("--decode-lanes", "2"),
    "3lanes": ("--decode-lanes", "3"),
    "routekv": ("--route", "kv"),
    "prompts55": ("--prefill-share", "0.55"),
    "routekv55": ("--route", "kv", "--prefill-share", "0.55"),
    "2to1": ("--weights-shares", "2,1"),
    "5to3": ("--weights-shares", "5,3"),
}
"""What a layout may be set beside."""


def beside_share(layout: str) -> float:
    """Of every FFN, on the KV rank's GPU: the last of the layout's weights shares, or of its variant's; 0 for none."""
    name, _, variant = layout.partition(".")
    flags = (*GPU_LAYOUTS[name], *(VARIANTS[variant] if variant else ()))
    given = [after for flag, after in pairwise(flags) if flag == "--weights-shares"]
    shares = [float(part) for part in given[-1].split(",")] if given and name.endswith("s") else []
    return shares[-1] / sum(shares) if shares else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One completion of a given length: tokens served, or the server's words."""

    status: int
    num_tokens: int
    message: str


@contextmanager
def layout_server(
    layout: str,
    models: Sequence[Path],
    port: int,
    flags: Sequence[str],
    log: Path,
    layouts: Mapping[str, Sequence[str]] = LAYOUTS,
) -> Iterator[str]:
    """`crosspool serve` in `layout`, ready; gives its address. Raises RuntimeError with its last words otherwise."""
    command = [sys.executable, "-m", "crosspool", "serve", *map(str, models), "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *layouts[layout], *flags], stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-500:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready within {READY_TIMEOUT_S:.0f} s: {log.read_text()[-500:]}")
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)


def context_limits(url: str) -> dict[str, int]:
    """Tokens of prompt and answer that one request of each model gets, as the server says."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return {card["id"]: card["max_model_len"] for card in json.load(answer)["data"]}


def ask(url: str, model: str, prompt_tokens: int, timeout_s: float = 600.0) -> Asked:
    """A completion of one token after a prompt of so many."""
    body = {"model": model, "prompt": [10 + number % 900 for number in range(prompt_tokens)], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            usage: dict[str, Any] = json.load(answer)["usage"]
            return Asked(200, usage["prompt_tokens"] + usage["completion_tokens"], "")
    except urllib.error.HTTPError as error:
        return Asked(error.code, 0, error.read().decode("utf-8", "replace")[:300])


def longest_request(url: str, model: str, limit: int) -> int:
    """Tokens of the longest request that the server serves: `limit` is tried, and that one token more is refused."""
    served, beyond = ask(url, model, limit - 1), ask(url, model, limit)
    if served.status != 200:
        raise RuntimeError(f"{model} says {limit} tokens and does not serve them: {served.message}")
    if beyond.status == 200:
        raise RuntimeError(f"{model} says {limit} tokens and serves {beyond.num_tokens}")
    return served.num_tokens
