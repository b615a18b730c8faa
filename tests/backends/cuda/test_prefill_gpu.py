"""Prefill ranks on GPUs behind the engine: tokens of the two pools, models in turn, a killed rank, shared GPUs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from crosspool.cluster.base import StepFailed  # noqa: E402
from crosspool.cluster.messages import Step  # noqa: E402
from crosspool.cluster.start import start_cluster  # noqa: E402
from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config  # noqa: E402
from crosspool.deployment.prepared_model import prepare_models  # noqa: E402
from crosspool.engine.async_engine import AsyncEngine  # noqa: E402
from crosspool.engine.engine import Engine  # noqa: E402
from crosspool.engine.request import GenerationRequest  # noqa: E402
from crosspool.pools_config import PoolsConfig  # noqa: E402
from crosspool.units import MiB  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES = ("qwen3_moe", "deepseek_v2")
CHUNK = 192
ONE_PLACE, TWO_PLACES = 12 * MiB, 40 * MiB
OWN_GPU = {"num_gpus": 2}
BESIDE_THE_KV_RANK = {"num_gpus": 2, "prefill_gpus": (0,)}
ALL_ON_ONE = {"num_gpus": 1}
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="places ranks on two GPUs; this machine has one")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_tiny_model(root / family, family, dtype="bfloat16", max_position_embeddings=2048)
    return tuple(ModelConfig(source=str(root / family), name=family) for family in FAMILIES)


class Running:
    """A deployment with its models loaded, the prefill steps that it was given, and why steps failed."""

    def __init__(self, config: DeploymentConfig, hosts: tuple[tuple[str, ...], ...] | None) -> None:
        cluster = cluster_config(config)
        self.cluster = start_cluster(cluster if hosts is None else replace(cluster, hosts=hosts))
        self.num_dedicated = self.num_inline = 0
        submit = self.cluster.submit

        def counted(step):
            self.num_dedicated += step.header.prefill_rank is not None
            self.num_inline += step.header.prefill_rank is None and step.header.phase == "prefill"
            submit(step)

        self.cluster.submit = counted
        self.failures: list[str] = []
        poll = self.cluster.poll

        def noted(timeout_s):
            events = poll(timeout_s)
            self.failures += [event.error for event in events if isinstance(event, StepFailed)]
            return events

        self.cluster.poll = noted
        self.engine = AsyncEngine(Engine(engine_config(config), self.cluster).start())

    def hold_up(self, rank: str) -> None:
        """From now on the rank hears of steps once the others have waited for it for a while."""
        steps, held = self.cluster._steps, []
        send = steps._send

        def sent(to, message):
            if to == rank and isinstance(message, Step):
                held.append(message)
            else:
                send(to, message)
            if to == "kv0" and held:  # which leads, so that it is the last one
                for host in self.cluster._hosts:
                    host.flush()
                time.sleep(0.05)
                send(rank, held.pop())

        steps._send = sent

    def kill(self, rank: str) -> None:
        (host,) = [host for host in self.cluster._hosts if rank in host.ranks]
        os.kill(host.pid, signal.SIGKILL)

    async def answers(self, tag: str, count: int = 6) -> list[list[int]]:
        """Tokens of prompts of several chunks, of both models at once."""

        async def answer(index: int) -> list[int]:
            rng, model = random.Random(index % 4), FAMILIES[index % 2]
            prompt = [rng.randrange(1, 500) for _ in range(150 + 130 * (index % 4))] + [7 + index] * (index // 4 * 40)
            request = GenerationRequest(
                request_id=f"{tag}-{index}",
                model=model,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
            )
            return [token async for output in self.engine.generate(request) for token in output.token_ids]

        first = await asyncio.gather(*map(answer, range(min(count, 4))))
        return first + await asyncio.gather(*map(answer, range(4, count)))


@asynccontextmanager
async def deployed(models, placed, room, hosts=None):
    """room: of the prefill rank; 0: there is none. hosts: ranks that share a process, if not those of a GPU."""
    pools = {"prefill": "dedicated", "prefill_pool_bytes": room} if room else {}
    config = DeploymentConfig(
        models=models,
        pools=PoolsConfig(backend="cuda", kv_pool_bytes=64 * MiB, **placed, **pools),
        scheduling=SchedulingConfig(
            max_num_batched_tokens=CHUNK, batch_invariant=True, enable_prefix_caching=False, max_num_seqs=8
        ),
    )
    prepared, running = prepare_models(config), Running(config, hosts)
    try:
        for model in prepared:
            await running.engine.add_model(model.served)
        yield running
    finally:
        await running.engine.close()


@pytest.fixture(scope="module")
def expected(models):
    """What the two pools answer."""

    async def found():
        async with deployed(models, ALL_ON_ONE, 0) as running:
            answers = await running.answers("pools")
            assert running.failures == [], "a step was replayed"
            return answers

    return asyncio.run(found())


@pytest.mark.parametrize(
    ("placed", "room"),
    [
        pytest.param(ALL_ON_ONE, ONE_PLACE, id="all-on-one"),
        pytest.param(ALL_ON_ONE, TWO_PLACES, id="all-on-one-both-in-place"),
        pytest.param(OWN_GPU, TWO_PLACES, id="own-gpu", marks=TWO_GPUS),
        pytest.param(BESIDE_THE_KV_RANK, ONE_PLACE, id="beside-the-kv-rank", marks=TWO_GPUS),
    ],
)
def test_prompts_of_a_prefill_rank_give_the_tokens_of_the_pools(models, expected, placed, room):
    async def check():
        async with deployed(models, placed, room) as running:
            assert await running.answers("dedicated") == expected
            assert running.failures == [], "a step was replayed"
            assert (running.num_dedicated, running.num_inline) == (11, 1), "all but a chunk of 26 tokens"
            print(running.engine.memory_bytes())

    asyncio.run(check())


@pytest.mark.parametrize(("late", "room"), [("p0", TWO_PLACES), ("kv0", TWO_PLACES), ("w0", 0)])
def test_a_first_step_needs_nothing_that_waits_for_a_peers_kernel(models, expected, late, room):
    """A kernel that its first launch loads waits until all others of the device have ended: a step whose peer waits on
    the same GPU would end at its deadline."""

    async def check():
        async with deployed(models, ALL_ON_ONE, room) as running:
            running.hold_up(late)
            assert await running.answers("held-up") == expected
            request = GenerationRequest(
                request_id="long",
                model=FAMILIES[0],
                prompt_token_ids=tuple(range(1, 501)) * 3,
                sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            )
            for model in FAMILIES:
                long = replace(request, request_id=f"long-{model}", model=model)
                assert [token async for output in running.engine.generate(long) for token in output.token_ids]
            assert running.failures == [], "a step was replayed"

    asyncio.run(check())


def test_models_take_turns_and_a_killed_prefill_rank_costs_no_request(models, expected):
    """On one GPU the prefill rank takes turns with the pools on it, in a process of its own."""
    placed = OWN_GPU if torch.cuda.device_count() > 1 else ALL_ON_ONE

    async def check():
        async with deployed(models, placed, ONE_PLACE, hosts=(("kv0", "w0"),)) as running:
            hurt = asyncio.create_task(running.answers("hurt"))
            await asyncio.sleep(0.03)
            running.kill("p0")
            assert await hurt == expected
            assert await running.answers("meanwhile") == expected
            assert running.num_inline > 0, "while the rank is away its prompts run in the pools"
            assert running.engine.stats().ranks_down or running.num_dedicated
            until_s = time.monotonic() + 60
            while running.engine.stats().ranks_down:
                assert time.monotonic() < until_s, "the prefill rank does not come back"
                await asyncio.sleep(0.1)
            before = running.num_dedicated
            assert await running.answers("after") == expected
            assert running.num_dedicated > before, "the rank is back and is not used"
            assert running.engine.stats().prefill_switches["p0"] > 2

    asyncio.run(check())
