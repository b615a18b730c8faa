"""Requests all the time while a served process's ranks are killed and stopped: does every answer end as undisturbed?

Each answer is compared as it ends and printed at once, and what was seen so far is written after every recovery.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report
from benchmarks.served.clients import Answer, Clients, plans, prompt
from benchmarks.served.process import ServedProcess

AT_ONCE = 9
QUIET_S = 2.0
BOUND_S = 75.0
FAULTS = (("w0", "SIGKILL"), ("kv0", "SIGKILL"), ("w0", "SIGSTOP"), ("kv0", "SIGSTOP"))
TIE_NATS = 0.05
MOST_ASKED = 6
"""Answers that part whose two candidates the server is asked about."""

Plan = tuple[str, int, int, int]
"""(model, seed of the prompt, its tokens, tokens of the answer)."""


@dataclass(frozen=True)
class FaultPlan:
    """What is asked, and how long at least ranks are lost meanwhile; every fault is made once in any case.

    faults: (rank, name of the signal), in this order.
    """

    num_requests: int
    answer_tokens: int
    at_least_s: float
    faults: tuple[tuple[str, str], ...] = FAULTS


@dataclass
class Compared:
    """Answers beside the undisturbed run's, each judged as it ends.

    parted: (number of the request, answer, place of the first token that differs).
    """

    name: str
    requests: Sequence[Plan]
    undisturbed: Sequence[Answer]
    num_asked: int = 0
    num_whole: int = 0
    num_same: int = 0
    parted: list[tuple[int, Answer, int]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, index: int, answer: Answer) -> None:
        """An answer to request `index`."""
        expected = self.undisturbed[index].words
        is_whole = len(answer.words) == self.requests[index][3] and not answer.error
        pairs = enumerate(zip(answer.words, expected, strict=False))
        place = next((at for at, (one, two) in pairs if one != two), None)
        self.num_asked += 1
        self.num_whole += is_whole
        self.num_same += is_whole and answer.words == expected
        said = "the same" if is_whole and place is None else f"{len(answer.words)} tokens"
        if answer.error:
            self.errors[answer.error[:150]] += 1
            said += f", {answer.error[:150]}"
        if place is not None:
            self.parted.append((index, answer, place))
            said += f", parts at token {place}: {answer.words[place]} where {expected[place]} was"
        print(f"  {self.name} {index}: {answer.model}, prompt of {answer.prompt_tokens}: {said}", flush=True)

    def tell(self, report: Report) -> None:
        """The counts, as metrics."""
        report.metric(f"{self.name}_requests", self.num_asked)
        report.metric(f"{self.name}_ended_whole", self.num_whole, limit=self.num_asked, note="no error, every token")
        note = "as the undisturbed run's, token by token"
        report.metric(f"{self.name}_same_tokens", self.num_same, limit=self.num_asked, note=note)

    def summary(self) -> str:
        return (
            f"{self.name}: {self.num_asked} requests, {self.num_whole} whole, {self.num_same} the same; {self.errors}"
        )


@dataclass
class Breaks:
    """Seconds from each signal until every model gave a token again."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values()))

    def tell(self, report: Report) -> None:
        for name, seconds in self.seconds.items():
            note = f"until every model gave a token again; the worst of {len(seconds)}; the target"
            report.metric(f"recovery_s.{name}", max(seconds), limit=60.0, note=note)


@dataclass
class Traffic:
    """What a run with faults has seen so far."""

    report: Report
    compared: Compared
    out: Path
    breaks: Breaks = field(default_factory=Breaks)
    begin: float = field(default_factory=time.perf_counter)

    def write(self) -> None:
        """So far, so that a run which is cut short has told it."""
        report = copy.deepcopy(self.report)
        self.tell(report)
        report.write(self.out)

    def tell(self, report: Report) -> None:
        report.metric("faults_s", time.perf_counter() - self.begin, note="of mixed traffic with faults")
        self.breaks.tell(report)
        self.compared.tell(report)


async def faults(
    clients: Clients, server: ServedProcess, report: Report, names: Sequence[str], plan: FaultPlan, out: Path
) -> None:
    """The same requests undisturbed, again without a fault, then for a while as ranks are lost."""
    requests = list(plans(names, plan.num_requests, plan.answer_tokens))
    begin = time.perf_counter()
    undisturbed = await ask_all(clients, requests)
    print(f"undisturbed: {len(requests)} requests in {time.perf_counter() - begin:.1f} s", flush=True)
    failed = [answer.error for answer in undisturbed if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} undisturbed requests failed, the first with {failed[0]}")
    control = Compared("control", requests, undisturbed)
    for index, answer in enumerate(await ask_all(clients, requests[: len(requests) // 3])):
        control.add(index, answer)
    control.tell(report)
    traffic = Traffic(report, Compared("faults", requests, undisturbed), out)
    breaking = asyncio.create_task(break_ranks(clients, server, traffic, plan))
    number = 0

    async def worker() -> None:
        nonlocal number
        while not breaking.done():
            index, number = number % len(requests), number + 1
            traffic.compared.add(index, await clients.ask(*requests[index]))

    try:
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)), breaking)
    finally:  # a run that is cut short tells what it has seen
        traffic.tell(report)
        print(traffic.compared.summary(), flush=True)
    await leftovers(server, report, traffic.breaks.count)
    await ties(clients, report, traffic.compared)


async def ask_all(clients: Clients, requests: Sequence[Plan]) -> list[Answer]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(plan: Plan) -> Answer:
        async with limit:
            return await clients.ask(*plan)

    return await asyncio.gather(*(one(plan) for plan in requests))


async def break_ranks(clients: Clients, server: ServedProcess, traffic: Traffic, plan: FaultPlan) -> None:
    """Every fault once, and again in turn until the plan's time is over."""
    breaks, until = traffic.breaks, traffic.begin + plan.at_least_s
    while True:
        for rank, kind in plan.faults:
            if breaks.count >= len(plan.faults) and time.perf_counter() >= until:
                return
            await asyncio.sleep(QUIET_S)
            pid = await asyncio.to_thread(server.rank_pid, rank)
            begin = time.perf_counter()
            os.kill(pid, getattr(signal, kind))
            ready_s = await recovered(server, rank, begin)
            ready = begin + ready_s
            while min(clients.last_word.values()) < ready and time.perf_counter() - begin < BOUND_S:
                await asyncio.sleep(0.02)
            served_s = time.perf_counter() - begin
            breaks.seconds.setdefault(f"{rank}.{kind.lower()}", []).append(served_s)
            print(f"{kind} of {rank}: back after {ready_s:.1f} s, all served after {served_s:.1f} s", flush=True)
            traffic.write()


async def recovered(server: ServedProcess, rank: str, begin: float) -> float:
    """Seconds until /health says that a rank which was lost is back."""
    was_down = False
    while time.perf_counter() - begin < BOUND_S:
        health = await asyncio.to_thread(server.health)
        is_down = health.get("workers", {}).get(rank, {}).get("status") in ("recovering", "stuck")
        if was_down and not is_down:
            break
        was_down = was_down or is_down
        await asyncio.sleep(0.1)
    return time.perf_counter() - begin


async def leftovers(server: ServedProcess, report: Report, num_faults: int) -> None:
    """What is still held once nobody asks, and what the engine counted."""
    await asyncio.sleep(1.0)
    for state in ("used", "reserved"):
        left = server.gauge("crosspool:pool_bytes", pool="kv", state=state)
        report.metric(f"kv_bytes_left.{state}", left, limit=0, note="once every request has ended")
    health = server.health()
    report.metric("ranks_lost", num_faults, note="signals sent")
    print(f"health afterwards: {json.dumps(health)[:400]}", flush=True)


async def ties(clients: Clients, report: Report, compared: Compared) -> None:
    """How likely the server finds both tokens where answers part, asked for the first few with nothing else running."""
    num_ties = 0
    for index, answer, place in compared.parted[:MOST_ASKED]:
        model, seed, prompt_tokens, _ = compared.requests[index]
        expected = compared.undisturbed[index].words
        begun = prompt(seed, prompt_tokens) + [int(word.removeprefix("w")) for word in expected[:place]]
        likely = await clients.likely(model, begun)
        first, second = (likely.get(words[place]) for words in (expected, answer.words))
        is_tie = first is not None and second is not None and abs(first - second) <= TIE_NATS
        num_ties += is_tie
        print(f"  {index}: {model} at {place}: {expected[place]} {first}, {answer.words[place]} {second}", flush=True)
    if compared.parted:
        asked = min(MOST_ASKED, len(compared.parted))
        report.metric("faults_parted_at_ties", num_ties, limit=asked, note=f"of those asked about; {TIE_NATS} nats")
