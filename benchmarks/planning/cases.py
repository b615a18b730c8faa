"""What tables and figures of docs/concepts/planned-examples.md are about: setups, admission, demand, pooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.planning.contexts import BINS, admitted_monolithic, admitted_pool, draw_wishes
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.demand import ModelLoad
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.facts import ModelFacts
from crosspool.planner.group import GPUSet, Split, split_group
from crosspool.planner.holding import Holding
from crosspool.planner.layouts import Hosting, Room, static_hosting
from crosspool.planner.memory import MemoryFigures, StepBounds
from crosspool.planner.plan import GroupPlan, LayoutResult
from crosspool.planner.planner import plan_deployment
from crosspool.planner.pool_demand import estimate_pool
from crosspool.planner.request_table import SteadySpeed, table_from_lengths
from crosspool.units import GiB
from crosspool.workload.arrivals import GammaBursts, Poisson
from crosspool.workload.lengths import Lognormal

PAPER = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
PAPER_GPU_BYTES = 40 * 10**9
PAPER_ELASTIC: Hosting = (
    (PAPER[0], PAPER[2]),
    (PAPER[0], PAPER[1]),
    (PAPER[0], PAPER[1]),
    (PAPER[0], PAPER[1]),
    (PAPER[1], PAPER[2]),
)
ENGINE_SHARE = 0.85
"""Part of a GPU that engines with weights and KV together commonly give to both; the rest is theirs."""
SEED = 7
TRIALS = 200
H200_COUNTS = (2, 4, 8)
RATES = {"chat": (0.5, 2.0), "agent": (0.05, 0.2)}
"""Requests per second and model."""
LENGTHS = {
    "chat": {"prompt": 862, "output": 665, "prompt_cv": 0.9, "output_cv": 0.2},
    "agent": {"prompt": 60770, "output": 743, "prompt_cv": 1.0, "output_cv": 1.5, "longest": 131072},
}


def facts(names: Iterable[str]) -> list[ModelFacts]:
    return [catalogue_facts(name) for name in names]


def paper_split() -> Split:
    gpus = GPUSet(num_gpus=5, memory_bytes=PAPER_GPU_BYTES)
    return split_group(facts(PAPER), gpus, 1, StepBounds(), MemoryFigures())


def own_room() -> Room:
    """What our planner leaves of one of the five GPUs for weights and KV."""
    parts = paper_split().gpus[0].parts
    beside = sum(parts[name] for name in ("activations", "logits", "graphs", "runtime", "reserve"))
    return Room(num_gpus=5, bytes_per_gpu=PAPER_GPU_BYTES - beside)


def admitted(each: int, share: float | None) -> dict[str, list[float]]:
    """Percent of requests admitted by layout and bin. share: part of a GPU that weights and KV get; None: ours."""
    models, split = facts(PAPER), paper_split()
    room = own_room() if share is None else Room(num_gpus=5, bytes_per_gpu=int(PAPER_GPU_BYTES * share))
    static = static_hosting(models, own_room())
    assert static is not None
    found: dict[str, list[float]] = {"static": [], "elastic": [], "crosspool": []}
    for bin_k in BINS:
        counts = dict.fromkeys(found, 0)
        for trial in range(TRIALS):
            wishes = draw_wishes(models, bin_k, each, SEED + trial)
            counts["static"] += admitted_monolithic(wishes, static, room)
            counts["elastic"] += admitted_monolithic(wishes, PAPER_ELASTIC, room)
            counts["crosspool"] += admitted_pool(wishes, split)
        for layout, count in counts.items():
            found[layout].append(100.0 * count / (TRIALS * each * len(models)))
    return found


def h200_layouts() -> Iterator[tuple[int, str, LayoutResult]]:
    """GPUs, name and result of each layout of the three paper models on H200s."""
    for count in H200_COUNTS:
        for num_kv in sorted({1, count // 2}):
            given = {"gpus": {"kind": "h200", "count": count, "kv": num_kv}, "models": list(PAPER)}
            layouts = plan_deployment(parse_plan_input(given)).plan.layouts
            for result in layouts if num_kv == 1 else layouts[:1]:
                name = f"crosspool {num_kv} + {count - num_kv}" if result.layout == "crosspool" else result.layout
                yield count, name, result


def h200_demand(count: int, traffic: str, rate: float) -> GroupPlan:
    """The plan of the three paper models under one kind of traffic, on the fastest split that fits."""
    models = [{"model": name, "rate": rate, "lengths": LENGTHS[traffic]} for name in PAPER]
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    given = {"gpus": {"kind": "h200", "count": count}, "models": models, "precision": 0.02, "engine": engine}
    return plan_deployment(parse_plan_input(given)).plan.groups[0]


def cold_loads(num_models: int, cv: float) -> list[ModelLoad]:
    """Cold models of catalogue KV sizes, 0.05 requests/s each, reasoning-like lengths, 20 ms a token."""
    names = (*PAPER, "gpt-oss-20b", "mixtral-8x7b", "glm-4.5-air")
    loads = []
    for idx in range(num_models):
        model = catalogue_facts(names[idx % len(names)], f"cold-{idx}")
        geometry = model.geometry(2 << 20)
        lengths = Lognormal(prompt_mean=1268, output_mean=1527, prompt_cv=2.0, output_cv=1.5, longest=32768)
        requests = table_from_lengths(lengths, SteadySpeed(tbt_s=0.02), np.random.default_rng([SEED, idx]))
        holding = Holding(
            policy="forecast",
            kv_bytes_per_token=model.kv_bytes_per_token,
            page_tokens=geometry.page_tokens,
            page_bytes=geometry.page_bytes,
        )
        arrivals = Poisson(rate_rps=0.05) if cv == 1 else GammaBursts(rate_rps=0.05, cv=cv)
        loads.append(ModelLoad(name=model.name, arrivals=arrivals, requests=requests, holding=holding))
    return loads


def pooling_gains(cv: float) -> list[tuple[int, float, float]]:
    """(models, P99 of the sum in GiB, gain) for 2 to 300 models."""
    gains = []
    for num_models in (2, 3, 5, 10, 30, 100, 300):
        demand = estimate_pool(cold_loads(num_models, cv), precision=0.02, seed=SEED)
        gains.append((num_models, demand.paged.value / GiB, demand.pooling_gain))
    return gains
