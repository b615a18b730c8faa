"""The load itself: every request at its time, in one event loop, with the loop's own delay beside the measurements."""

import asyncio
import contextlib
import gc
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosspool.bench.record import REFUSALS, RequestRecord
from crosspool.bench.sse import DONE, EventStreamProtocol, StreamError, error_text
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest

PROBE_EVERY_S = 0.01
"""How often the event loop is asked whether it is late."""

STARTED, ENDED, NOT_SERVED, TOKENS = range(4)
"""Places in `tally`, which whoever shows progress reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """max_concurrency: requests under way at once; None: as many as are due. timeout_s: of one request."""

    max_concurrency: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max-concurrency is {self.max_concurrency}; it must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout is {self.timeout_s}; it must be above 0 seconds")


@dataclass(kw_only=True, slots=True)
class ClientRun:
    """Records of one client, and what the client itself added.

    late_s: how long after its moment each request was taken up; loop_lags_s: how late the event loop was at a probe
    every 10 ms, which is the most that a token's time may be wrong by; cpu_s: processor time spent.
    """

    records: list[RequestRecord] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


async def run_load(
    requests: Sequence[PlannedRequest],
    targets: Mapping[str, Target],
    settings: LoadSettings,
    tally: MutableSequence[int],
    start: Callable[[], float] = time.monotonic,
) -> ClientRun:
    """Send every request and wait for the last answer. targets: where each model is asked.

    start: called once everything is ready; gives the `time.monotonic()` of the run's beginning.
    """
    bodies = [targets[planned.model].request(planned) for planned in requests]
    doors = {model: Door.to(target) for model, target in targets.items()}
    with _without_garbage_collection():
        return await _send(requests, bodies, doors, settings, tally, start())


@dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """A server's address, looked up before the clock runs."""

    address: str
    port: int
    server_hostname: str | None
    context: ssl.SSLContext | None

    @staticmethod
    def to(target: Target) -> "Door":
        name = target.host if target.is_tls else None
        return Door(address=target.address(), port=target.port, server_hostname=name, context=target.ssl_context())


async def _send(
    requests: Sequence[PlannedRequest],
    bodies: Sequence[bytes],
    doors: Mapping[str, Door],
    settings: LoadSettings,
    tally: MutableSequence[int],
    start_s: float,
) -> ClientRun:
    run, room = ClientRun(), asyncio.Semaphore(settings.max_concurrency or max(1, len(requests)))
    cpu = time.process_time()

    async def one(record: RequestRecord, body: bytes) -> None:
        async with room:
            tally[STARTED] += 1
            record.started_s = time.monotonic() - start_s
            await _ask(record, body, doors[record.model], settings, tally, start_s)
            tally[ENDED] += 1
            tally[NOT_SERVED] += record.outcome != "served"

    probe = asyncio.create_task(_probe(run.loop_lags_s))
    tasks = []
    try:
        for planned, body in zip(requests, bodies, strict=True):
            while (wait_s := start_s + planned.due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            run.late_s.append(-wait_s)
            record = RequestRecord(
                index=planned.index,
                model=planned.model,
                prompt_tokens=planned.prompt_tokens,
                due_s=planned.due_s,
            )
            run.records.append(record)
            tasks.append(asyncio.create_task(one(record, body)))
        await asyncio.gather(*tasks)
    finally:
        for task in (probe, *tasks):
            task.cancel()
        await asyncio.gather(probe, *tasks, return_exceptions=True)
    run.cpu_s = time.process_time() - cpu
    return run


async def _ask(
    record: RequestRecord,
    body: bytes,
    door: Door,
    settings: LoadSettings,
    tally: MutableSequence[int],
    start_s: float,
) -> None:
    """Fill `record` with what comes. Nothing is raised: a failure is an outcome."""
    pieces: list[str] = []
    is_done = False

    def on_event(moment: float, data: bytes) -> None:
        nonlocal is_done
        if data == DONE:
            is_done = True
            return
        event = json.loads(data)
        if event.get("error"):
            record.error = record.error or error_text(protocol.status, data)
            return
        for choice in event.get("choices") or ():
            text = _text(choice)
            if text or (choice.get("finish_reason") is None and "delta" not in choice):
                record.token_times_s.append(moment - start_s)
                pieces.append(text)
                tally[TOKENS] += 1
        if usage := event.get("usage"):
            record.output_tokens = usage.get("completion_tokens") or 0
            record.server_prompt_tokens = usage.get("prompt_tokens") or 0
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    protocol = EventStreamProtocol(body, on_event)
    try:
        async with asyncio.timeout(settings.timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: protocol,
                door.address,
                door.port,
                ssl=door.context,
                server_hostname=door.server_hostname,
            )
            await protocol.ended
    except TimeoutError:
        record.error = f"no whole answer within {settings.timeout_s:g} s"
    except (OSError, StreamError) as error:
        record.error = record.error or str(error)
    finally:
        protocol.close()
    record.sent_s = protocol.sent_s - start_s
    record.status = protocol.status
    record.text = "".join(pieces)
    record.output_tokens = record.output_tokens or len(record.token_times_s)
    record.server_prompt_tokens = record.server_prompt_tokens or record.prompt_tokens
    _judge(record, protocol, is_done)


def _judge(record: RequestRecord, protocol: EventStreamProtocol, is_done: bool) -> None:
    if protocol.status in REFUSALS:
        record.outcome = "refused"
        record.error = error_text(protocol.status, bytes(protocol.body))
    elif protocol.status and protocol.status != 200:
        record.error = error_text(protocol.status, bytes(protocol.body))
    elif not record.error and not record.token_times_s:
        record.error = "the answer holds no token"
    elif not record.error and not is_done:
        record.error = "the stream ended without [DONE]"
    elif not record.error:
        record.outcome = "served"


def _text(choice: dict[str, Any]) -> str:
    """What an event adds to an answer, of either API; reasoning is text too."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")


async def _probe(lags_s: list[float]) -> None:
    while True:
        due = time.monotonic() + PROBE_EVERY_S
        await asyncio.sleep(PROBE_EVERY_S)
        lags_s.append(max(0.0, time.monotonic() - due))


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a run would be a pause of the client."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
