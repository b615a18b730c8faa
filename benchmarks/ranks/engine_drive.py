"""The engine as a caller of its API sees it, for benchmarks: directories in, greedy answers and times out."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.core import SamplingParams
from crosspool.deployment.launch import load_models, start_engine
from crosspool.deployment.prepared_model import prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.pools_config import HostLayout, PoolsConfig
from crosspool.units import KiB, MiB


@dataclass(frozen=True, slots=True)
class Job:
    """One greedy request of known length."""

    model: str
    prompt: tuple[int, ...]
    num_tokens: int


def running_engine(
    directories: Sequence[Path], layout: HostLayout, scheduling: SchedulingConfig = SchedulingConfig()
) -> AbstractAsyncContextManager[AsyncEngine]:
    """An engine with the directories' models loaded, in threads or processes."""
    return engine_of(
        DeploymentConfig(
            models=tuple(ModelConfig(source=str(path)) for path in directories),
            pools=PoolsConfig(layout=layout, kv_pool_bytes=64 * MiB, frame_bytes=64 * KiB),
            scheduling=scheduling,
        )
    )


@asynccontextmanager
async def engine_of(config: DeploymentConfig) -> AsyncIterator[AsyncEngine]:
    """A deployment's engine with its models loaded, until the end of the block."""
    engine = start_engine(config)
    try:
        await load_models(engine, prepare_models(config))
        yield engine
    finally:
        await engine.close()


async def greedy_outputs(
    engine: AsyncEngine, model: str, prompt: Sequence[int], num_tokens: int, request_id: str
) -> list[RequestOutput]:
    """Everything that one greedy request of known length gives. Raises the error that it ends with."""
    request = GenerationRequest(
        request_id=request_id,
        model=model,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
    )
    outputs = [output async for output in engine.generate(request)]
    if outputs[-1].error is not None:
        raise outputs[-1].error
    return outputs


async def run_jobs(engine: AsyncEngine, jobs: Sequence[Job], tag: str) -> tuple[list[list[int]], float]:
    """Run all jobs at once; their tokens and the seconds until the last one ended."""
    start = time.perf_counter()
    tokens = await asyncio.gather(*(_run(engine, job, f"{tag}-{idx}") for idx, job in enumerate(jobs)))
    return list(tokens), time.perf_counter() - start


async def _run(engine: AsyncEngine, job: Job, request_id: str) -> list[int]:
    outputs = await greedy_outputs(engine, job.model, job.prompt, job.num_tokens, request_id)
    return [token for output in outputs for token in output.token_ids]
