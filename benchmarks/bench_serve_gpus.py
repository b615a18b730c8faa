"""How fast does the whole engine decode from GPUs, several models at once, sampling included?

    python -m benchmarks.bench_serve_gpus DIR... [--weights-ranks 1] [--requests 24] [--max-tokens 96] [--out DIRECTORY]

Requests of all models arrive together; the second of two rounds is measured. No HTTP. Times between tokens are the
engine's, one sequence at a time: last token less first token, over the tokens between them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ranks.on_gpus import start_gpu_ranks
from benchmarks.report import RESULTS, Report
from crosspool.core import SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine import Engine
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.engine.serve_directory import served_model
from crosspool.units import GiB, MiB


async def collect(engine: AsyncEngine, request: GenerationRequest) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def one_round(
    engine: AsyncEngine, models: Sequence[str], count: int, max_tokens: int
) -> list[list[RequestOutput]]:
    requests = [
        GenerationRequest(
            request_id=f"{time.monotonic_ns()}-{index}",
            model=models[index % len(models)],
            prompt_token_ids=tuple((7 * index + 3 * position) % 500 + 1 for position in range(5 + 3 * index)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, ignore_eos=True),
            seed=100 + index,
        )
        for index in range(count)
    ]
    return await asyncio.gather(*(collect(engine, request) for request in requests))


def between_tokens_ms(outputs: list[RequestOutput]) -> float:
    times, tokens = outputs[-1].timings, outputs[-1].usage.completion_tokens
    assert times.last_token_s is not None
    assert times.first_token_s is not None
    return (times.last_token_s - times.first_token_s) * 1e3 / (tokens - 1)


async def run(options: argparse.Namespace) -> None:
    ranks = tuple(f"w{index}" for index in range(options.weights_ranks))
    engine_config = EngineConfig(kv_budget_bytes=options.kv_gib * GiB, frame_bytes=2 * MiB)
    models = [
        served_model(path, weights_ranks=ranks, frame_bytes=2 * MiB, kv_dtype="bfloat16") for path in options.models
    ]
    cluster = start_gpu_ranks(ranks, engine_config)
    engine = AsyncEngine(Engine(engine_config, cluster).start())
    try:
        begin = time.perf_counter()
        await asyncio.gather(*(engine.add_model(model) for model in models))
        load_s = time.perf_counter() - begin
        names = [model.name for model in models]
        first = await one_round(engine, names, options.requests, options.max_tokens)
        begin = time.perf_counter()
        second = await one_round(engine, names, options.requests, options.max_tokens)
        seconds = time.perf_counter() - begin
    finally:
        await engine.close()
    tokens = [
        [[token for output in outputs for token in output.token_ids] for outputs in each] for each in (first, second)
    ]
    config = {"models": names, "requests": options.requests, "max_tokens": options.max_tokens}
    report = Report("serve_gpus", hardware=f"h200-x{1 + len(ranks)}", config=config, seed=100)
    report.summary = "Engine, cluster and CUDA workers without HTTP; temperature 0.8, top-p 0.95."
    report.samples("tbt_ms", [between_tokens_ms(outputs) for outputs in second])
    report.metric("tokens_per_s", sum(map(len, tokens[1])) / seconds)
    report.metric("ready_s", load_s, note="start of processes and GPUs, load and capture of all models")
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    report.metric("requests_with_the_same_tokens", same, limit=options.requests, note="two rounds, batches differ")
    report.write(options.out)
    print(report.as_markdown(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="DIR")
    parser.add_argument("--weights-ranks", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
