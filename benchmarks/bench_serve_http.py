"""Three full-size models behind `crosspool serve` on GPUs and the openai client: a very long prompt, ranks killed.

    python -m benchmarks.bench_serve_http [--parts long,faults] [--seconds 60] [--long-tokens 131072] [--kv-bytes 60GiB]

Random weights. Traffic: streams of every model with prompts of 20 to 3,000 tokens, greedy. `faults` runs the same
requests undisturbed first, then while each kind of rank is killed (SIGKILL) and stopped (SIGSTOP), and compares tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.full_models import CONFIGS, write_model_dir
from benchmarks.report import RESULTS, Report

PORT = 8123
START_TIMEOUT_S = 240


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


class Server:
    """`crosspool serve` in a process of its own."""

    def __init__(self, models: Sequence[str], kv_bytes: str, log: Path, more: Sequence[str] = ()) -> None:
        directory = Path(tempfile.mkdtemp())
        paths = [str(write_model_dir(directory, name)) for name in models]
        self._log = log.open("wb")
        command = [sys.executable, "-m", "crosspool", "serve", *paths, "--backend", "cuda", "--weights", "random"]
        command += ["--kv-pool-bytes", kv_bytes, "--port", str(PORT), "--no-enable-prefix-caching", *more]
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def wait_ready(self) -> float:
        """Seconds from its start until every model may be asked."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}; see its log")
            if time.perf_counter() - self.begin > START_TIMEOUT_S:
                raise TimeoutError("the server is not ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=5):
                    return time.perf_counter() - self.begin
            except OSError:
                time.sleep(0.2)

    def rank_pid(self, rank: str) -> int:
        """The process of a rank: its command line ends with the rank's name."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if b"crosspool.cluster.rank_process" in words and rank.encode() in words:
                    return int(path.parent.name)
        raise RuntimeError(f"no process of {rank}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 100_000, size=tokens).tolist()  # type: ignore[no-any-return]


class Clients:
    def __init__(self) -> None:
        import openai

        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=200
        )

    async def ask(self, model: str, seed: int, prompt_tokens: int, max_tokens: int) -> Answer:
        """One streamed completion. A refusal with Retry-After is asked again; an error ends the answer."""
        answer = Answer(model, prompt_tokens, time.perf_counter())
        while True:
            try:
                stream = await self._client.completions.create(
                    model=model,
                    prompt=prompt(seed, prompt_tokens),
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for chunk in stream:
                    words = chunk.choices[0].text.split() if chunk.choices else []
                    answer.words += words
                    answer.moments += [time.perf_counter()] * len(words)
                return answer
            except Exception as failure:
                if getattr(failure, "status_code", 0) in (429, 503) and not answer.words:
                    await asyncio.sleep(0.5)
                    continue
                answer.error = f"{type(failure).__name__}: {failure}"
                return answer


def plans(names: Sequence[str], count: int, max_tokens: int) -> Iterator[tuple[str, int, int, int]]:
    """(model, seed, prompt tokens, answer tokens) of `count` requests: short and long prompts in turn."""
    sizes = (20, 700, 30, 3000, 28, 1500)
    for number in range(count):
        yield names[number % len(names)], 1000 + number, sizes[number % len(sizes)], max_tokens


async def long_prompt(clients: Clients, report: Report, names: Sequence[str], tokens: int) -> None:
    """One very long prompt of GLM while the two others answer."""
    target = next(name for name in names if "glm" in name)
    others = [name for name in names if name != target]
    for name in names:
        await clients.ask(name, 1, 600, 8)
    begin = time.perf_counter()
    quiet = await asyncio.gather(*(clients.ask(name, 5, 400, 300) for name in others))
    before = {answer.model: answer.gaps_ms(begin, time.perf_counter()) for answer in quiet}
    is_over = False

    async def keep_asking(name: str) -> list[Answer]:
        found: list[Answer] = []
        while not is_over:
            found.append(await clients.ask(name, 20 + len(found), 400, 200))
        return found

    tasks = [asyncio.create_task(keep_asking(name)) for name in others]
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    answer = await clients.ask(target, 99, tokens, 32)
    end = time.perf_counter()
    is_over = True
    beside = [each for task in tasks for each in await task]
    if answer.error:
        raise RuntimeError(answer.error)
    report.metric(
        f"ttft_ms_beside_decode.{target}.1+1.{tokens // 1024}k", answer.ttft_ms, note="over HTTP, two models answer"
    )
    print(
        f"{target}, {tokens} tokens: first token after {answer.ttft_ms:.0f} ms, {len(answer.words)} tokens", flush=True
    )
    for name in others:
        gaps = [gap for each in beside if each.model == name for gap in each.gaps_ms(begin, end)]
        errors = [each.error for each in beside if each.model == name and each.error]
        label = f"{name}.beside_{tokens // 1024}k"
        report.metric(f"tbt_p50_ms_before_prefill.{label}", float(np.median(before[name])))
        report.metric(f"tbt_p50_ms_during_prefill.{label}", float(np.median(gaps)))
        report.metric(
            f"tbt_p99_ms_during_prefill.{label}", float(np.percentile(gaps, 99)), limit=10.0, note="the target"
        )
        print(
            f"  {name}: {len(gaps)} gaps, p50 {np.median(before[name]):.2f} before; p50 {np.median(gaps):.2f} "
            f"p99 {np.percentile(gaps, 99):.2f} max {max(gaps):.2f} ms during; errors {errors}",
            flush=True,
        )


async def faults(clients: Clients, server: Server, report: Report, names: Sequence[str], seconds: float) -> None:
    """Requests all the time; ranks killed and stopped; every answer compared with an undisturbed one."""
    requests = list(plans(names, int(seconds * 2.5), 120))
    limit = asyncio.Semaphore(9)

    async def one(plan: tuple[str, int, int, int]) -> Answer:
        async with limit:
            return await clients.ask(*plan)

    begin = time.perf_counter()
    undisturbed = await asyncio.gather(*(one(plan) for plan in requests))
    quiet_s = time.perf_counter() - begin
    again = await asyncio.gather(*(one(plan) for plan in requests[: len(requests) // 3]))
    same = sum(a.words == b.words for a, b in zip(undisturbed, again, strict=False))
    report.metric("same_tokens_when_asked_again", same, limit=len(again), note="other batches, no fault")
    print(
        f"undisturbed: {len(requests)} requests in {quiet_s:.1f} s, {same} of {len(again)} the same again", flush=True
    )
    moments: list[tuple[str, str, float]] = []

    async def break_ranks() -> None:
        for rank, kind in (("w0", "SIGKILL"), ("kv0", "SIGKILL"), ("w0", "SIGSTOP"), ("kv0", "SIGSTOP")):
            await asyncio.sleep(3.0)
            pid = await asyncio.to_thread(server.rank_pid, rank)
            os.kill(pid, getattr(signal, kind))
            begin = time.perf_counter()
            was_down = False
            while time.perf_counter() - begin < 75:
                health = await asyncio.to_thread(server.health)
                is_down = health.get("workers", {}).get(rank, {}).get("status") in ("recovering", "stuck")
                if was_down and not is_down:
                    break
                was_down = was_down or is_down
                await asyncio.sleep(0.1)
            recovery_s = time.perf_counter() - begin
            moments.append((rank, kind, recovery_s))
            report.metric(f"recovery_s.{rank}.{kind.lower()}", recovery_s, limit=60.0, note="the target")
            print(f"  {kind} of {rank}: serving again after {recovery_s:.1f} s", flush=True)

    breaking = asyncio.create_task(break_ranks())
    disturbed: list[tuple[int, Answer]] = []
    number = 0

    async def worker() -> None:
        nonlocal number
        while not breaking.done():
            index, number = number % len(requests), number + 1
            disturbed.append((index, await clients.ask(*requests[index])))

    await asyncio.gather(*(worker() for _ in range(9)), breaking)
    errors = [answer for _, answer in disturbed if answer.error]
    whole = sum(len(answer.words) == requests[index][3] for index, answer in disturbed)
    same = sum(answer.words == undisturbed[index].words for index, answer in disturbed)
    report.metric("faults_requests", len(disturbed))
    report.metric("faults_ended_whole", whole, limit=len(disturbed), note="every accepted request")
    report.metric("faults_same_tokens", same, limit=len(disturbed), note="as the undisturbed run's, token by token")
    print(f"with faults: {len(disturbed)} requests, {whole} whole, {same} with the same tokens, errors "
          f"{[answer.error[:150] for answer in errors[:4]]}", flush=True)  # fmt: skip
    print(f"health afterwards: {json.dumps(server.health())[:400]}", flush=True)


async def run(options: argparse.Namespace) -> None:
    names = options.models.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "server.log"
    report = Report(
        "serve_http", hardware="h200-x2", config={"models": names, "kv": options.kv_bytes, "more": options.more}, seed=7
    )
    report.summary = (
        "crosspool serve with random weights of the true shapes on one KV GPU and one weights GPU, over HTTP."
    )
    server = Server(names, options.kv_bytes, log, options.more.split())
    try:
        report.metric("ready_s", server.wait_ready(), note="from the start of the process; weights drawn on the GPU")
        print(f"ready after {report.metrics['ready_s']:.1f} s", flush=True)
        query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"]
        print(subprocess.run(query, capture_output=True, text=True, check=False).stdout, flush=True)
        clients = Clients()
        if "long" in options.parts:
            await long_prompt(clients, report, names, options.long_tokens)
        if "faults" in options.parts:
            await faults(clients, server, report, names, options.seconds)
    finally:
        server.close()
        print(log.read_text(errors="replace")[-options.log_tail :], flush=True)
        if report.metrics:
            report.write(options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--parts", default="long,faults")
    parser.add_argument("--kv-bytes", default="60GiB")
    parser.add_argument("--long-tokens", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--more", default="", help="further flags of `crosspool serve`, such as --batch-invariant")
    parser.add_argument("--log-tail", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
