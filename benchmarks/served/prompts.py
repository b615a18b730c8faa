"""Prompts through a served process: their first tokens, and the time between tokens of those that decode meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from benchmarks.bench_prefill import PEER_MS, PRODUCT_TFLOPS, prompt_flops
from benchmarks.full_models import full_spec
from benchmarks.report import Report
from benchmarks.served.clients import Answer, ClientApart, Clients

REPEATS = 2
ROWS = 4
ROW_TOKENS = 4000
SETTLE_S = 0.8


async def first_tokens(clients: Clients, report: Report, names: Sequence[str], contexts: Sequence[int]) -> None:
    """Each context of every model alone, then while sequences of another model decode."""
    apart = ClientApart()
    try:
        for name in names:
            alone = {context: await idle(apart, report, name, context) for context in contexts}
            neighbour = next(other for other in names if other != name)
            for context in contexts:
                await beside(clients, apart, report, name, context, neighbour, alone[context])
    finally:
        apart.close()


async def idle(apart: ClientApart, report: Report, name: str, context: int) -> float:
    """Median milliseconds to the first token, nothing else running."""
    answers = [await apart.ask(name, 300 + each, context, 2) for each in range(REPEATS + 1)]
    times = [whole(answer).ttft_ms for answer in answers[1:]]
    ttft = float(np.median(times))
    limit = sum(prompt_flops(full_spec(name), context)) / PRODUCT_TFLOPS / 1e9
    label = f"{name}.1+1.{context // 1024}k"
    note = f"products at {PRODUCT_TFLOPS:.0f} TFLOP/s; vLLM whole on one GPU {PEER_MS[name][context]:.0f} ms"
    report.metric(f"ttft_ms.{label}", ttft, limit=limit, note=note)
    report.metric(f"prefill_tokens_per_s.{label}", context / ttft * 1e3)
    report.metric(f"matrix_share.{label}", limit / ttft, limit=1.0, note="of one GPU's rate; two run")
    print(f"{label}: first token after {[round(each, 1) for each in times]} ms, limit {limit:.0f}", flush=True)
    return ttft


async def beside(
    clients: Clients, apart: ClientApart, report: Report, name: str, context: int, neighbour: str, alone_ms: float
) -> None:
    """The same prompt while ROWS sequences of `neighbour` decode."""
    async with decoding(clients, neighbour) as rows:
        answer = whole(await apart.ask(name, 400, context, 2))
    begin, end = answer.begin, answer.moments[0]
    for row in rows:
        whole(row)
    quiet = [gap for row in rows for gap in row.gaps_ms(begin - SETTLE_S / 2, begin)]
    gaps = [gap for row in rows for gap in row.gaps_ms(begin, end)]
    label = f"{neighbour}.{name}.1+1.{context // 1024}k"
    metric = f"ttft_ms_beside_decode.{name}.1+1.{context // 1024}k.{neighbour}"
    report.metric(metric, answer.ttft_ms, limit=2 * alone_ms, note=f"{ROWS} rows decode; twice the idle server's")
    if not gaps or not quiet:
        print(f"{label}: first token after {answer.ttft_ms:.1f} ms; too few tokens beside it", flush=True)
        return
    p50, p99 = np.percentile(gaps, [50, 99])
    report.metric(f"tbt_p50_ms_before_prefill.{label}", float(np.median(quiet)))
    report.metric(f"tbt_p50_ms_during_prefill.{label}", float(p50))
    report.metric(f"tbt_p99_ms_during_prefill.{label}", float(p99), limit=10.0, note="the target")
    print(
        f"{label}: first token after {answer.ttft_ms:.1f} ms; {len(gaps)} gaps, p50 {np.median(quiet):.2f} before; "
        f"p50 {p50:.2f} p99 {p99:.2f} max {max(gaps):.2f} during",
        flush=True,
    )


@contextlib.asynccontextmanager
async def decoding(clients: Clients, name: str) -> AsyncIterator[list[Answer]]:
    """ROWS sequences of a model that decode until the end of the block, where they are aborted."""
    rows: list[Answer] = []
    tasks = [asyncio.create_task(clients.ask(name, 60 + row, 500 + 100 * row, ROW_TOKENS, rows)) for row in range(ROWS)]
    gc.disable()  # the client's own pauses are not the server's
    try:
        await asyncio.sleep(SETTLE_S)
        yield rows
    finally:
        gc.enable()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole(answer: Answer) -> Answer:
    if answer.error or not answer.words:
        raise RuntimeError(f"{answer.model}, prompt of {answer.prompt_tokens}: {answer.error or 'no token'}")
    return answer


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
    apart = ClientApart()
    answer = await apart.ask(target, 99, tokens, 32)
    apart.close()
    is_over = True
    beside = [each for task in tasks for each in await task]
    begin, end = whole(answer).begin, answer.moments[0]
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
