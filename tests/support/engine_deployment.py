"""Three tiny models of three families on real workers, and what the undivided models would answer."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import cache
from pathlib import Path

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.start import start_cluster
from crosspool.core import SamplingParams
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine import Engine
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.engine.serve_directory import served_model
from crosspool.engine.served_model import ServedModel
from crosspool.models.directory import read_model_dir
from crosspool.pools_config import KVSplitChoice
from crosspool.units import KiB
from tests.support.awaited import soon
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import write_tiny_model

FAMILIES = ("qwen3_moe", "deepseek_v2", "glm4_moe_lite")
FRAME_BYTES = 64 * KiB
WEIGHTS_RANKS = ("w0", "w1")


def write_models(root: Path) -> dict[str, Path]:
    """Directories of tiny random models, by family."""
    for family in FAMILIES:
        write_tiny_model(root / family, family)
    return {family: root / family for family in FAMILIES}


def load_undivided(directories: dict[str, Path]) -> dict[str, MonolithicModel]:
    return {
        family: MonolithicModel.load(read_model_dir(path), len(WEIGHTS_RANKS)) for family, path in directories.items()
    }


class Deployment:
    """Three models on two weights ranks and one KV rank, or several that take turns as homes."""

    def __init__(
        self, directories: dict[str, Path], layout: str, *, kv_split: KVSplitChoice = "auto", **changes: object
    ) -> None:
        sizes = {"kv_budget_bytes": 300 * FRAME_BYTES, "max_num_batched_tokens": 32}
        self.config = EngineConfig(frame_bytes=FRAME_BYTES, **{**sizes, **changes})  # type: ignore[arg-type]
        self.models: list[ServedModel] = [
            served_model(
                path,
                kv_ranks=turned(self.config.kv_ranks, index),
                kv_split=kv_split,
                weights_ranks=WEIGHTS_RANKS,
                prefill_ranks=self.config.prefill_ranks,
                frame_bytes=FRAME_BYTES,
                page_tokens=16,
                name=family,
            )
            for index, (family, path) in enumerate(directories.items())
        ]
        self.cluster = start_cluster(
            ClusterConfig(
                layout=layout,  # type: ignore[arg-type]
                kv_ranks=self.config.kv_ranks,
                weights_ranks=WEIGHTS_RANKS,
                prefill_ranks=self.config.prefill_ranks,
                prefill_lanes=tuple(self.config.prefill_rank_of.items()),
                num_frames=self.config.num_frames,
                num_host_frames=self.config.num_host_frames,
                frame_bytes=FRAME_BYTES,
                max_tokens_per_step=self.config.max_tokens_per_step,
                num_lanes=self.config.num_lanes,
                step_deadline_s=2.0,
            )
        )
        self.engine = AsyncEngine(Engine(self.config, self.cluster).start())

    async def __aenter__(self) -> Deployment:
        await asyncio.gather(*(self.engine.add_model(model) for model in self.models))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.close()

    def kill(self, rank: str, with_signal: signal.Signals = signal.SIGKILL) -> None:
        [host] = [host for host in self.cluster._hosts if rank in host.ranks]
        os.kill(host.pid, with_signal)

    async def until_free(self) -> None:
        def is_free() -> bool:
            pools = self.engine.stats().pools
            return all(pool.frames_free + pool.frames_reusable == pool.frames_budget for pool in pools)

        await soon(is_free, lambda: f"pages did not return: {self.engine.stats().pools}")


def turned(ranks: tuple[str, ...], index: int) -> tuple[str, ...]:
    """The ranks, beginning with another one for each index."""
    first = index % len(ranks)
    return ranks[first:] + ranks[:first]


def requests(count: int, max_tokens: int) -> list[GenerationRequest]:
    """Greedy and seeded ones, of all models and of different lengths."""
    found = []
    for index in range(count):
        temperature = 0.0 if index % 2 == 0 else 0.8
        found.append(
            GenerationRequest(
                request_id=f"r{index}",
                model=FAMILIES[index % 3],
                prompt_token_ids=tuple((7 * index + 3 * position) % 500 + 1 for position in range(5 + 9 * index)),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True),
                seed=100 + index,
            )
        )
    return found


async def collect(engine: AsyncEngine, request: GenerationRequest) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


@cache
def wanted(model: MonolithicModel, request: GenerationRequest) -> list[int]:
    """Computed once: the same requests are asked of many deployments."""
    sampling = SamplingParams(
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        seed=request.seed or 0,
        ignore_eos=True,
    )
    return model.generate(request.prompt_token_ids, sampling)


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
