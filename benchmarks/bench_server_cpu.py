"""What the HTTP server costs on CPU cores, with an engine that costs nothing; and whether hours leave it as it was.

    python -m benchmarks.bench_server_cpu --soak-minutes 30

sse_tokens_per_s: tokens of 64 streams that come as fast as the server can send them, one event a token; client and
server in a process each. server_ttft_overhead_ms: time from a request's first byte to its first token at the client,
while the engine has that token at once and 100 other streams get 20 tokens a second each, all at the same moment. The
streams are read in one process, the requests made in another. probe_client_ms: what of it is the client and the
network, by the same request to a process that answers anything with the bytes that the client waits for. The server
has one core and the clients the others, so that neither waits for a core that the other is on, as over a network.
soak_rss_growth_percent: of the process that grew most, in minutes of mixed traffic on the demo models
(`benchmarks/served/soak.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import selectors
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.report import Report
from benchmarks.served.soak import run_soak
from benchmarks.served.stub_engine import FAST, StubEngine
from crosspool.config import ServerConfig
from crosspool.demo.scenario import demo_model_dirs
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue, ModelFrontend
from crosspool.server.run import listen, run_loop, serve
from crosspool.server.tokenizer import TextTokenizer

NUM_FAST_STREAMS = 64
NUM_PACED_STREAMS = 100
PACED_TOKENS_PER_S = 20
DATA = b"data: {"
Cores = frozenset[int]
WARM_UP_PROBES = 50
PROBE_PAUSE_S = 0.02  # at most, and random: probes have to meet every phase of the streams' pace
SEED = 2026


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the throughput run")
    parser.add_argument("--probes", type=int, default=1000, help="requests whose first token is timed")
    parser.add_argument("--soak-minutes", type=float, default=30.0, help="0 leaves the soak out")
    parser.add_argument("--soak-json", type=Path, help="figures of a soak that has run: SOAK_JSON=FILE make soak")
    parser.add_argument("--note", default="", help="a sentence for the summary: what else the machine did")
    args = parser.parse_args()
    config = {**vars(args), "soak_json": args.soak_json and args.soak_json.name}
    report = Report("server", hardware="cpu", config=config, seed=SEED)
    mine, its = multiprocessing.Pipe()
    servers_cores, clients_cores = split_cores()
    server = multiprocessing.get_context("spawn").Process(target=run_server, args=(its, servers_cores), daemon=True)
    server.start()
    keep_to(clients_cores)
    try:
        port = mine.recv()
        tokens_per_s, cpu_us = asyncio.run(throughput(port, args.seconds, psutil.Process(server.pid)))
        others = OtherWork()
        overhead_ms = ttft_overhead(port, args.probes)
        others_cores = others.cores()
        client_ms = client_alone(args.probes // 2, servers_cores)
    finally:
        server.terminate()
        server.join(10)
        keep_to(servers_cores | clients_cores)
    report.metric("sse_tokens_per_s", tokens_per_s, note=f"{NUM_FAST_STREAMS} streams, an event a token")
    report.metric("sse_cpu_us_per_token", cpu_us, note="of the server's process, whatever else the machine does")
    report.samples("server_ttft_overhead_ms", overhead_ms, note=f"beside {NUM_PACED_STREAMS} streams")
    report.samples("probe_client_ms", client_ms, note="the same client at a process that answers at once")
    report.metric("others_cores", others_cores, note="that other processes were busy on meanwhile; they slow this down")
    soak = None
    if args.soak_json is not None:
        soak = json.loads(args.soak_json.read_text())
    elif args.soak_minutes:
        soak = run_soak(args.soak_minutes, SEED).figures()
    if soak is not None:
        growth = max(soak["growth_percent"].values())
        report.metric("soak_rss_growth_percent", growth, note="of the process that grew most; 2 at most")
        report.metric("soak_requests", float(soak["num_requests"]), note=f"in {soak['minutes']:g} minutes")
        report.metric("soak_left_over", float(soak["num_left"]), note="frames, sequences, tasks and sockets")
    report.summary = (
        f"{tokens_per_s:.0f} SSE tokens a second through the whole server; the median first token costs "
        f"{sorted(overhead_ms)[len(overhead_ms) // 2]:.2f} ms beside {NUM_PACED_STREAMS} streams. "
        f"Other processes were busy on {others_cores:.2f} of {os.cpu_count()} cores meanwhile. {args.note}"
    )
    for path in report.write():
        print(path)
    print(report.as_markdown())
    return 0


class OtherWork:
    """What processes that are not this benchmark's take of the machine, from now on."""

    def __init__(self) -> None:
        self._from_s, self._took_s = time.perf_counter(), self._taken_s()

    def cores(self) -> float:
        """Cores that they were busy on."""
        return (self._taken_s() - self._took_s) / (time.perf_counter() - self._from_s)

    def _taken_s(self) -> float:
        machine, this = psutil.cpu_times(), psutil.Process()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        guests_s = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # part of user and nice
        own_s = sum(this.cpu_times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in this.children(recursive=True))
        return float(sum(machine) - idle_s - guests_s - own_s)


def split_cores() -> tuple[Cores, Cores]:
    """The server's core and the clients'. Nothing where there is one core alone, or another system than Linux."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return (frozenset(cores[:1]), frozenset(cores[1:])) if len(cores) > 1 else (frozenset(), frozenset())


def keep_to(cores: Cores) -> None:
    """Run this process, and those that it will start, on `cores`; anywhere where none are named."""
    if cores:
        os.sched_setaffinity(0, cores)


def run_server(port: Connection, cores: Cores) -> None:
    """The server in a process of its own, on a free port that it tells."""
    keep_to(cores)
    directory = demo_model_dirs()["austen"]
    tokenizer = TextTokenizer.from_directory(directory)
    frontends = [ModelFrontend(name=name, vocab_size=4096, tokenizer=tokenizer) for name in (FAST, "paced")]
    config = ServerConfig(port=0)
    engine = StubEngine(1 / PACED_TOKENS_PER_S)
    app = create_app(engine, Catalogue(frontends), config)
    listener = listen(config)

    async def load() -> None:
        port.send(listener.getsockname()[1])

    run_loop(serve(app, engine, load, listener, config))


async def throughput(port: int, seconds: float, server: psutil.Process) -> tuple[float, float]:
    """Tokens a second over all streams and microseconds of the server's CPU a token, after a second of warm-up."""
    counted = 0
    streams = [await _open(port, FAST, 1_000_000 - 100) for _ in range(NUM_FAST_STREAMS)]

    async def count(reader: asyncio.StreamReader) -> None:
        nonlocal counted
        while block := await reader.read(1 << 18):
            counted += block.count(DATA)

    tasks = [asyncio.create_task(count(reader)) for reader, _ in streams]
    await asyncio.sleep(1.0)
    before, started, spent = counted, time.perf_counter(), sum(server.cpu_times()[:2])
    await asyncio.sleep(seconds)
    tokens = counted - before
    rate = tokens / (time.perf_counter() - started)
    cpu_us = 1e6 * (sum(server.cpu_times()[:2]) - spent) / tokens
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _, writer in streams:
        writer.close()
    return rate, cpu_us


def ttft_overhead(port: int, num_probes: int) -> list[float]:
    """Milliseconds to the first token of requests that come one after another beside the paced streams.

    The streams are read in a process of their own, since what that costs is not the server's.
    """
    mine, its = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_streams, args=(port, its), daemon=True)
    reader.start()
    try:
        mine.recv()
        times = [_probe(port) for _ in range(WARM_UP_PROBES + num_probes)]
    finally:
        reader.terminate()
        reader.join(10)
    return times[WARM_UP_PROBES:]


def client_alone(num_probes: int, cores: Cores) -> list[float]:
    """Milliseconds that a probe takes where nothing is served: the client's own and the network's."""
    mine, its = multiprocessing.Pipe()
    answering = multiprocessing.get_context("spawn").Process(target=answer_at_once, args=(its, cores), daemon=True)
    answering.start()
    try:
        port = mine.recv()
        return [_probe(port) for _ in range(WARM_UP_PROBES + num_probes)][WARM_UP_PROBES:]
    finally:
        answering.terminate()
        answering.join(10)


def answer_at_once(port: Connection, cores: Cores) -> None:
    """Answers every connection's first bytes with those that a probe waits for."""
    keep_to(cores)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(DATA)


def _probe(port: int) -> float:
    """One request over a new connection, by hand: a client library would take longer than the server."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request, received = _request(FAST, 1), b""
        started = time.perf_counter()
        connection.sendall(request)
        while DATA not in received:
            received += connection.recv(1 << 16)
        took_s = time.perf_counter() - started
    time.sleep(PROBE_PAUSE_S * random.random())
    return 1000 * took_s


def read_streams(port: int, ready: Connection) -> None:
    """The paced streams' clients, in a process of their own that does as little as it can.

    It stands back for the process that probes: else a probe's answer would lie there unread while a step's tokens are
    read.
    """
    os.nice(10)
    selector = selectors.DefaultSelector()
    for _ in range(NUM_PACED_STREAMS):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(_request("paced", 900_000))
        selector.register(stream, selectors.EVENT_READ)
    told_s = time.monotonic() + 2.0
    buffer = bytearray(1 << 16)
    while True:
        for key, _ in selector.select():
            key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
        if told_s and time.monotonic() > told_s:
            ready.send(NUM_PACED_STREAMS)
            told_s = 0.0


async def _open(port: int, model: str, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has been asked for, over a connection of its own; HTTP by hand costs the client least."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(model, max_tokens))
    await writer.drain()
    return reader, writer


def _request(model: str, max_tokens: int) -> bytes:
    body = json.dumps({"model": model, "prompt": "the sea", "max_tokens": max_tokens, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


if __name__ == "__main__":
    raise SystemExit(main())
