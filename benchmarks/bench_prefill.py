"""How soon does the first token of a prompt come, alone and beside others that decode?

    python -m benchmarks.bench_prefill [--models a,b,c] [--contexts 4096,32768] [--weights-ranks 1] [--kv-gib 40]

Full-size models with random weights behind the whole engine, a process for each rank, without HTTP. Neighbours are
sequences of the other model, or of the same one where there is one only, that decode while a prompt runs. Limits are
the operations of the prompt's products at the measured rate of a large one, one pool after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.full_models import CONFIGS, full_spec, write_model_dir
from benchmarks.ranks.on_gpus import start_gpu_ranks
from benchmarks.report import RESULTS, Report
from crosspool.core import SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine import Engine
from crosspool.engine.request import GenerationRequest
from crosspool.engine.serve_directory import served_model
from crosspool.models.spec import GQASpec, ModelSpec, MoEFFNSpec
from crosspool.units import GiB, MiB

PRODUCT_TFLOPS = 750.0
"""A large bf16 product of random values on this chip."""
PEER_MS = {
    "qwen3-30b-a3b": {4096: 105.0, 32768: 1179.0},
    "glm-4.7-flash": {4096: 121.0, 32768: 1352.0},
    "deepseek-v2-lite": {4096: 139.0, 32768: 614.0},
}
"""vLLM 0.24 with the whole model on one such GPU."""


def prompt_flops(spec: ModelSpec, tokens: int) -> tuple[float, float]:
    """Operations of a prompt's products on the KV rank and on the weights ranks, head left out."""
    attention = ffn = 0.0
    pairs = tokens * (tokens + 1) / 2
    for layer in spec.layers:
        part = layer.attention
        hidden = spec.hidden_size
        if isinstance(part, GQASpec):
            width = part.num_heads * part.head_dim
            weights = hidden * (2 * width + 2 * part.num_kv_heads * part.head_dim)
            dims = 2 * width
        else:
            q = part.num_heads * part.qk_head_dim
            q_weights = hidden * q if part.q_lora_rank is None else part.q_lora_rank * (hidden + q)
            up = part.kv_lora_rank * part.num_heads * (part.qk_nope_head_dim + part.v_head_dim)
            weights = q_weights + hidden * part.kv_elements_per_token + up + hidden * part.num_heads * part.v_head_dim
            dims = part.num_heads * (part.qk_head_dim + part.v_head_dim)
        attention += 2.0 * tokens * weights + 2.0 * pairs * dims
        if isinstance(layer.ffn, MoEFFNSpec):
            shared = 0 if layer.ffn.shared is None else layer.ffn.shared.intermediate_size
            ffn += 6.0 * tokens * hidden * (layer.ffn.top_k * layer.ffn.expert_intermediate_size + shared)
        else:
            ffn += 6.0 * tokens * hidden * layer.ffn.intermediate_size
    return attention, ffn


class Client:
    """Sends requests and notes when their tokens come."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(7)
        self._count = 0

    async def run(self, model: str, prompt_tokens: int, max_tokens: int) -> tuple[float, list[float]]:
        """(milliseconds to the first token, moments of all tokens)."""
        self._count += 1
        request = GenerationRequest(
            request_id=str(self._count),
            model=model,
            prompt_token_ids=tuple(self._rng.integers(1, 100_000, size=prompt_tokens).tolist()),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        moments: list[float] = []
        ttft_s = 0.0
        async for output in self._engine.generate(request):
            moments += [time.perf_counter()] * len(output.token_ids)
            if output.timings.ttft_s is not None:
                ttft_s = output.timings.ttft_s
        return ttft_s * 1e3, moments


def gaps_ms(moments: Sequence[float], begin: float, end: float) -> list[float]:
    """Milliseconds between tokens that came in [begin, end]."""
    inside = [moment for moment in moments if begin <= moment <= end]
    return [1e3 * (b - a) for a, b in pairwise(inside)]


class Bench:
    def __init__(self, client: Client, report: Report, layout: str, contexts: Sequence[int], repeats: int) -> None:
        self.client, self.report, self.layout, self.contexts, self.repeats = client, report, layout, contexts, repeats

    async def alone(self, name: str) -> dict[int, float]:
        """Median milliseconds to the first token of each context."""
        spec, found = full_spec(name), {}
        for context in self.contexts:
            await self.client.run(name, context, 2)
            times = [(await self.client.run(name, context, 2))[0] for _ in range(self.repeats)]
            found[context] = sorted(times)[len(times) // 2]
            attention, ffn = prompt_flops(spec, context)
            limit = (attention + ffn) / PRODUCT_TFLOPS / 1e9
            metric = f"ttft_ms.{name}.{self.layout}.{context // 1024}k"
            peer = PEER_MS[name].get(context)
            note = f"products at {PRODUCT_TFLOPS:.0f} TFLOP/s" + (
                f"; vLLM whole on one GPU {peer:.0f} ms" if peer else ""
            )
            self.report.metric(metric, found[context], limit=limit, note=note)
            self.report.metric(
                f"prefill_tokens_per_s.{name}.{self.layout}.{context // 1024}k", context / found[context] * 1e3
            )
            self.report.metric(
                f"matrix_share.{name}.{self.layout}.{context // 1024}k", limit / found[context], limit=1.0,
                note="of one GPU's rate; two run",
            )  # fmt: skip
            print(f"{metric}: {found[context]:.0f} ms of {[round(t) for t in times]}, limit {limit:.0f}", flush=True)
        return found

    async def beside(self, name: str, neighbour: str, alone: dict[int, float], rows: int) -> None:
        """The same while `rows` sequences of `neighbour` decode."""
        for context in self.contexts:
            seconds = 1.5 + 4 * alone[context] / 1e3
            tokens = int(seconds / 0.003)
            decoding = [asyncio.create_task(self.client.run(neighbour, 500 + 100 * row, tokens)) for row in range(rows)]
            await asyncio.sleep(1.0)
            begin = time.perf_counter()
            ttft, _ = await self.client.run(name, context, 2)
            end = time.perf_counter()
            moments = [(await task)[1] for task in decoding]
            quiet = [gap for each in moments for gap in gaps_ms(each, begin - 0.7, begin)]
            gaps = [gap for each in moments for gap in gaps_ms(each, begin, end)]
            label = f"{name}.{self.layout}.{context // 1024}k"
            self.report.metric(
                f"ttft_ms_beside_decode.{label}",
                ttft,
                limit=2 * alone[context],
                note=f"{rows} rows of {neighbour} decode",
            )
            if not gaps or not quiet:
                print(f"{label}: neighbours ended before the prompt", flush=True)
                continue
            p50, p99 = np.percentile(gaps, [50, 99])
            self.report.metric(f"tbt_p50_ms_during_prefill.{neighbour}.{label}", float(p50))
            self.report.metric(
                f"tbt_p99_ms_during_prefill.{neighbour}.{label}", float(p99), limit=10.0, note="the target"
            )
            self.report.metric(f"tbt_p50_ms_before_prefill.{neighbour}.{label}", float(np.median(quiet)))
            print(
                f"{label} beside {rows} rows of {neighbour}: ttft {ttft:.0f} ms; between tokens "
                f"{np.median(quiet):.2f} before, p50 {p50:.2f} p99 {p99:.2f} max {max(gaps):.2f} during",
                flush=True,
            )


async def run(options: argparse.Namespace) -> None:
    names = options.models.split(",")
    contexts = [int(context) for context in options.contexts.split(",")]
    ranks = tuple(f"w{index}" for index in range(options.weights_ranks))
    engine_config = EngineConfig(
        kv_budget_bytes=options.kv_gib * GiB,
        frame_bytes=2 * MiB,
        max_num_batched_tokens=options.chunk,
        prefix_caching=False,
    )
    directory = Path(tempfile.mkdtemp())
    models = [
        replace(
            served_model(
                write_model_dir(directory, name), weights_ranks=ranks, frame_bytes=2 * MiB, kv_dtype="bfloat16"
            ),
            has_random_weights=True,
        )
        for name in names
    ]
    cluster = start_gpu_ranks(ranks, engine_config)
    engine = AsyncEngine(Engine(engine_config, cluster).start())
    layout = f"1+{len(ranks)}"
    config = {"models": names, "contexts": contexts, "chunk": options.chunk, "layout": layout}
    report = Report("prefill", hardware=f"h200-x{1 + len(ranks)}", config=config, seed=7)
    report.summary = "Time to first token through the engine (no HTTP), alone and beside decoding sequences."
    try:
        begin = time.perf_counter()
        for model in models:
            await engine.add_model(model)
        report.metric("ready_s", time.perf_counter() - begin, note="random weights drawn, kernels warmed up")
        print(f"ready after {time.perf_counter() - begin:.1f} s: {cluster.memory_bytes()}", flush=True)
        bench = Bench(Client(engine), report, layout, contexts, options.repeats)
        for name in names:
            alone = await bench.alone(name)
            others = [other for other in names if other != name] or [name]
            await bench.beside(name, others[0], alone, options.rows)
    finally:
        await engine.close()
        if report.metrics:
            report.write(options.out)
    print(report.as_markdown(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--weights-ranks", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--kv-gib", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
