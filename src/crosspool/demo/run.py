"""The demo from start to end: a real server process, overlapping HTTP requests, the live view, the report."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live

from crosspool.demo.client import Answer, stream_chat
from crosspool.demo.report import DemoReport, PoolSample, make_report
from crosspool.demo.scenario import DemoRequest, demo_model_dirs, demo_requests
from crosspool.demo.view import final_view, live_view
from crosspool.errors import CrossPoolError

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
SAMPLE_INTERVAL_S = 0.05
BACKLOG = 128


def run_demo(*, host: str, port: int | None, keep: bool, as_json: bool, seed: int) -> None:
    """Run the demo; `keep` leaves the server up until Ctrl-C. Raises CrossPoolError, with the reason, if it fails."""
    console = Console(stderr=as_json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    listener = _listener(host, port)
    base_url = _url(host, listener.getsockname()[1])
    with _server(listener, console) as server:
        try:
            report = asyncio.run(_ask(base_url, server, console, seed))
        except* httpx2.HTTPError as errors:
            raise CrossPoolError(f"lost the demo's server at {base_url}: {errors.exceptions[0]!r}") from None
        except* CrossPoolError as errors:
            raise CrossPoolError(str(errors.exceptions[0])) from None
        if as_json:
            print(json.dumps(report.to_json()))
        else:
            console.print(final_view(report, console.width))
        if keep:
            console.print(_how_to_ask(base_url), highlight=False, markup=False, soft_wrap=True)
            _wait_for_interrupt(server)


@contextmanager
def _server(listener: socket.socket, console: Console) -> Iterator[subprocess.Popen[bytes]]:
    """`crosspool serve` with the three models, two pools in two processes, on `listener`, which becomes its own."""
    directories = demo_model_dirs()
    missing = [str(path) for path in directories.values() if not (path / "config.json").is_file()]
    if missing:
        raise CrossPoolError(f"the package lacks its demo models ({', '.join(missing)}); install it again")
    command = [sys.executable, "-m", "crosspool", "serve", *(str(path) for path in directories.values())]
    command += ["--listen-fd", str(listener.fileno()), "--layout", "processes", "--log-level", "warning"]
    command += ["--kv-pool-bytes", "8MiB", "--frame-bytes", "64KiB"]
    console.print(
        f"[dim]starting {' '.join([Path(sys.executable).name, *command[1:3]])} with {len(directories)} models[/]"
    )
    server: subprocess.Popen[bytes] | None = None
    try:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # the server never sees it: the demo ends it
        try:
            server = subprocess.Popen(command, pass_fds=(listener.fileno(),))
        finally:
            listener.close()  # so that what asks is refused once the server has ended
            signal.pthread_sigmask(signal.SIG_SETMASK, held)  # raises a Ctrl-C that has come in between
        yield server
    finally:
        if server is not None:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


async def _ask(base_url: str, server: subprocess.Popen[bytes], console: Console, seed: int) -> DemoReport:
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as http:
        await _until_ready(http, server)
        pool = (await _stats(http))["pools"][0]
        answers: list[Answer] = []
        samples: list[PoolSample] = []
        running: dict[int, Answer] = {}
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            watching = asyncio.create_task(_watch(http, samples, running, live, pool["frames_budget"]))
            try:
                answers = await _send_all(http, running, seed)
                await _until_free(samples, watching)
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
    return make_report(answers, samples, frame_bytes=pool["frame_bytes"], budget_frames=pool["frames_budget"])


async def _send_all(http: httpx2.AsyncClient, running: dict[int, Answer], seed: int) -> list[Answer]:
    """Send every burst; the next begins once two thirds of the one before have ended."""
    tasks: list[asyncio.Task[Answer]] = []

    async def one(idx: int, request: DemoRequest) -> Answer:
        await asyncio.sleep(request.delay_s)
        return await stream_chat(http, request, seed + idx, lambda answer: running.__setitem__(idx, answer))

    async with asyncio.TaskGroup() as group:
        for burst in demo_requests():
            started = [group.create_task(one(len(tasks) + i, request)) for i, request in enumerate(burst)]
            tasks += started
            for ended in islice(asyncio.as_completed(started), len(started) * 2 // 3):
                await ended
    return [task.result() for task in tasks]


async def _until_free(samples: list[PoolSample], watching: asyncio.Task[None]) -> None:
    """Return once a later sample shows every page back, a step behind the last answer; after END_TIMEOUT_S anyway."""
    num_seen, deadline = len(samples), time.monotonic() + END_TIMEOUT_S
    while (len(samples) == num_seen or any(samples[-1].frames_used.values())) and time.monotonic() < deadline:
        await asyncio.wait([watching], timeout=SAMPLE_INTERVAL_S)
        if watching.done():
            return  # it failed, which its caller hears of


async def _watch(
    http: httpx2.AsyncClient, samples: list[PoolSample], running: dict[int, Answer], live: Live, budget_frames: int
) -> None:
    """Sample the server's statistics and redraw, until cancelled."""
    started = time.monotonic()
    while True:
        stats = await _stats(http)
        samples.append(
            PoolSample(
                at_s=time.monotonic() - started,
                frames_used={model["name"]: model["frames_used"] for model in stats["models"]},
                lanes=tuple(lane["model"] if lane["state"] == "running" else None for lane in stats["lanes"]),
            )
        )
        live.update(live_view(list(running.values()), samples, budget_frames, live.console.width))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


async def _stats(http: httpx2.AsyncClient) -> dict[str, Any]:
    response = await http.get("/stats")
    if response.status_code != 200 or "pools" not in response.json():
        raise CrossPoolError(
            f"{http.base_url}/stats answered HTTP {response.status_code}, {response.text[:100]!r}; "
            "if another server is there, give the demo its own --port"
        )
    stats: dict[str, Any] = response.json()
    return stats


async def _until_ready(http: httpx2.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise CrossPoolError(
                f"the server ended at start with exit code {server.returncode}; its last lines say why"
            )
        try:
            if (await http.get("/health/ready")).status_code == 200:
                return
        except httpx2.TransportError:  # it has just ended, or is slow to start
            pass
        await asyncio.sleep(0.1)
    raise CrossPoolError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listener(host: str, asked: int | None) -> socket.socket:
    """Listens on `asked`, or else on 8000, as the guides say, or any free port where something listens there already.

    Raises CrossPoolError where none can be had: a server that is there already must not be taken for the demo's own.
    """
    wanted = (8000, 0) if asked is None else (asked,)
    for candidate in wanted:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            listener.close()
            if candidate == wanted[-1]:
                where = host if asked is None else f"{host}:{asked}"
                reason = getattr(error, "strerror", None) or error
                raise CrossPoolError(f"cannot listen on {where}: {reason}; give another --host or --port") from None
        else:
            return listener
    raise AssertionError("unreachable")


def _how_to_ask(base_url: str) -> str:
    return (
        f"the server stays up; Ctrl-C ends it. Watch and ask it at {base_url}/ui, or:\n"
        f"  curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '    -d \'{"model": "austen", "messages": [{"role": "user", "content": "The letter came at noon."}]}\''
    )


def _wait_for_interrupt(server: subprocess.Popen[bytes]) -> None:
    try:
        server.wait()
    except KeyboardInterrupt:
        return
