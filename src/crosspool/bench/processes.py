"""Several client processes that share one load, for servers that are faster than one core can read."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from crosspool.bench.client import ClientRun, LoadSettings, run_load
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest
from crosspool.errors import CrossPoolError

LOOK_EVERY_S = 0.2
START_IN_S = 0.1
"""Time between the last client's word that it is ready and the run's beginning."""

Show = Callable[[Sequence[int]], None]
"""Called now and then with the tally so far: started, ended, not served, tokens."""


def run_clients(
    requests: Sequence[PlannedRequest],
    targets: Mapping[str, Target],
    settings: LoadSettings,
    num_processes: int,
    show: Show,
) -> ClientRun:
    """The records of all requests, in the order of `requests`. Raises CrossPoolError if a client process ends early."""
    if num_processes == 1:
        return asyncio.run(_alone(requests, targets, settings, show))
    if settings.max_concurrency is not None and settings.max_concurrency < num_processes:
        raise ValueError(
            f"max-concurrency {settings.max_concurrency} is less than {num_processes} client processes; use fewer"
        )
    context = multiprocessing.get_context("spawn")
    tallies, pipes, workers = [], [], []
    for number in range(num_processes):
        mine, its = context.Pipe()
        tally = context.RawArray("q", 4)
        share = replace(settings, max_concurrency=_share(settings.max_concurrency, number, num_processes))
        arguments = (its, list(requests[number::num_processes]), targets, share, tally)
        worker = context.Process(target=_client, args=arguments, daemon=True)
        worker.start()
        its.close()
        tallies.append(tally)
        pipes.append(mine)
        workers.append(worker)
    try:
        for pipe in pipes:
            _receive(pipe)
        start_s = time.monotonic() + START_IN_S
        for pipe in pipes:
            pipe.send(start_s)
        runs = []
        for pipe in pipes:
            while not pipe.poll(LOOK_EVERY_S):
                show([sum(column) for column in zip(*tallies, strict=True)])
            runs.append(_receive(pipe))
        return _merged(runs)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join(10)


async def _alone(
    requests: Sequence[PlannedRequest], targets: Mapping[str, Target], settings: LoadSettings, show: Show
) -> ClientRun:
    tally = [0, 0, 0, 0]

    async def keep_showing() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            show(tally)

    showing = asyncio.create_task(keep_showing())
    try:
        return await run_load(requests, targets, settings, tally)
    finally:
        showing.cancel()
        show(tally)


def _client(
    pipe: Connection,
    requests: list[PlannedRequest],
    targets: Mapping[str, Target],
    settings: LoadSettings,
    tally: MutableSequence[int],
) -> None:
    def start() -> float:
        pipe.send(None)
        start_s: float = pipe.recv()
        return start_s

    pipe.send(asyncio.run(run_load(requests, targets, settings, tally, start)))


def _receive(pipe: Connection) -> ClientRun:
    try:
        received: ClientRun = pipe.recv()
        return received
    except EOFError:
        raise CrossPoolError("a client process ended early; see its message above") from None


def _share(total: int | None, number: int, count: int) -> int | None:
    return None if total is None else total // count + (number < total % count)


def _merged(runs: Sequence[ClientRun]) -> ClientRun:
    merged = ClientRun(cpu_s=sum(run.cpu_s for run in runs))
    for run in runs:
        merged.records += run.records
        merged.late_s += run.late_s
        merged.loop_lags_s += run.loop_lags_s
    merged.records.sort(key=lambda record: record.index)
    return merged
