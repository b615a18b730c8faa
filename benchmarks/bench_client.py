"""What the load generator itself can take: tokens a second that one core of `crosspool bench` reads.

    python -m benchmarks.bench_client

A process that costs nothing to speak of sends events as a server would, one a token, over 64 streams, each in its own
write; the client takes them as in any run. client_tokens_per_s: by the client's own processor time, since the machine
may do other things; client_wall_tokens_per_s: by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from multiprocessing.connection import Connection

from benchmarks.report import Report
from crosspool.bench.client import ClientRun, LoadSettings, run_load
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "any",
    "choices": [{"index": 0, "text": " sea", "logprobs": None, "finish_reason": None, "stop_reason": None}],
}


def chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


def serve_events(port: Connection, num_tokens: int) -> None:
    """Answers any request with `num_tokens` events, as fast as they are taken."""
    token, end = chunk(json.dumps(EVENT, separators=(",", ":"))), chunk("[DONE]") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(num_tokens):
            writer.write(token)
            await writer.drain()
            await asyncio.sleep(0)  # one event a stream, then the next stream's
        writer.write(end)
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def measure(num_streams: int, num_tokens: int) -> ClientRun:
    mine, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve_events, args=(its, num_tokens), daemon=True)
    server.start()
    try:
        target = Target(base_url=f"http://127.0.0.1:{mine.recv()}")
        requests = [
            PlannedRequest(index=index, due_s=0.0, model="any", prompt_tokens=8, output_tokens=num_tokens)
            for index in range(num_streams)
        ]
        return asyncio.run(run_load(requests, {"any": target}, LoadSettings(), [0, 0, 0, 0]))
    finally:
        server.terminate()
        server.join(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    args = parser.parse_args()
    run = measure(args.streams, args.tokens)
    tokens = sum(len(record.token_times_s) for record in run.records)
    assert tokens == args.streams * args.tokens, f"{tokens} of {args.streams * args.tokens} tokens came"
    wall_s = max(record.token_times_s[-1] for record in run.records)
    report = Report("client", hardware="cpu", config=vars(args))
    report.metric("client_tokens_per_s", tokens / run.cpu_s, note="by its processor time; 5,000 at least")
    report.metric("client_wall_tokens_per_s", tokens / wall_s, note="the sending process and other work beside it")
    report.metric("client_cpu_us_per_token", 1e6 * run.cpu_s / tokens)
    report.samples("client_loop_lag_ms", [1e3 * lag for lag in run.loop_lags_s], note="at full speed")
    report.summary = f"`crosspool bench` reads {tokens / run.cpu_s:.0f} tokens a second on one core."
    for path in report.write():
        print(path)
    print(report.as_markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
