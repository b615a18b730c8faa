"""Requests all the time while a served process's ranks are killed and stopped: does every answer end as undisturbed?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.report import Report
from benchmarks.served.clients import Answer, Clients, plans
from benchmarks.served.process import ServedProcess

AT_ONCE = 9
QUIET_S = 2.0
BOUND_S = 75.0
FAULTS = (("w0", "SIGKILL"), ("kv0", "SIGKILL"), ("w0", "SIGSTOP"), ("kv0", "SIGSTOP"))


@dataclass
class Breaks:
    """Seconds from each signal until every model gave a token again."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values()))


async def faults(
    clients: Clients, server: ServedProcess, report: Report, names: Sequence[str], num_requests: int, fault_s: float
) -> None:
    """The same requests undisturbed, again without a fault, then for `fault_s` seconds while ranks are lost."""
    requests = list(plans(names, num_requests, 120))
    begin = time.perf_counter()
    undisturbed = await ask_all(clients, requests)
    quiet_s = time.perf_counter() - begin
    again = await ask_all(clients, requests[: len(requests) // 3])
    tell(report, "control", requests, list(enumerate(again)), undisturbed)
    print(f"undisturbed: {len(requests)} requests in {quiet_s:.1f} s", flush=True)
    breaks = Breaks()
    breaking = asyncio.create_task(break_ranks(clients, server, breaks, time.perf_counter() + fault_s))
    disturbed: list[tuple[int, Answer]] = []
    number = 0

    async def worker() -> None:
        nonlocal number
        while not breaking.done():
            index, number = number % len(requests), number + 1
            disturbed.append((index, await clients.ask(*requests[index])))

    begin = time.perf_counter()
    try:
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)), breaking)
    finally:  # a run that is cut short tells what it has seen
        report.metric("faults_s", time.perf_counter() - begin, note="of mixed traffic with faults")
        for name, seconds in breaks.seconds.items():
            note = f"until every model gave a token again; the worst of {len(seconds)}; the target"
            report.metric(f"recovery_s.{name}", max(seconds), limit=60.0, note=note)
        tell(report, "faults", requests, disturbed, undisturbed)
    await leftovers(server, report, breaks.count)


async def ask_all(clients: Clients, requests: Sequence[tuple[str, int, int, int]]) -> list[Answer]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(plan: tuple[str, int, int, int]) -> Answer:
        async with limit:
            return await clients.ask(*plan)

    return await asyncio.gather(*(one(plan) for plan in requests))


async def break_ranks(clients: Clients, server: ServedProcess, breaks: Breaks, until: float) -> None:
    """Every fault once, and again in turn until `until`."""
    while True:
        for rank, kind in FAULTS:
            if breaks.count >= len(FAULTS) and time.perf_counter() >= until:
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
            print(f"  {kind} of {rank}: back after {ready_s:.1f} s, all served after {served_s:.1f} s", flush=True)


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


def tell(
    report: Report,
    name: str,
    requests: Sequence[tuple[str, int, int, int]],
    found: Sequence[tuple[int, Answer]],
    undisturbed: Sequence[Answer],
) -> None:
    """found: (number of the request, answer)."""
    whole = [(index, answer) for index, answer in found if len(answer.words) == requests[index][3] and not answer.error]
    other = [(index, answer) for index, answer in whole if answer.words != undisturbed[index].words]
    errors = Counter(answer.error[:150] for _, answer in found if answer.error)
    report.metric(f"{name}_requests", len(found))
    report.metric(f"{name}_ended_whole", len(whole), limit=len(found), note="no error, every token")
    note = "as the undisturbed run's, token by token"
    report.metric(f"{name}_same_tokens", len(whole) - len(other), limit=len(found), note=note)
    print(
        f"{name}: {len(found)} requests, {len(whole)} whole, {len(whole) - len(other)} the same; {errors}", flush=True
    )
    for index, answer in other[:12]:
        pairs = zip(answer.words, undisturbed[index].words, strict=True)
        place = next(place for place, (one, two) in enumerate(pairs) if one != two)
        print(f"  {answer.model}, prompt of {answer.prompt_tokens}: parts at token {place}", flush=True)


async def leftovers(server: ServedProcess, report: Report, num_faults: int) -> None:
    """What is still held once nobody asks, and what the engine counted."""
    await asyncio.sleep(1.0)
    for state in ("used", "reserved"):
        left = server.gauge("crosspool:pool_bytes", pool="kv", state=state)
        report.metric(f"kv_bytes_left.{state}", left, limit=0, note="once every request has ended")
    health = server.health()
    report.metric("ranks_lost", num_faults, note="signals sent")
    print(f"health afterwards: {json.dumps(health)[:400]}", flush=True)
