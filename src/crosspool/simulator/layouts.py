"""Groups to simulate from what the planner decided: two pools, or the same GPUs with weights and KV together.

crosspool: the plan's ranks. KV ranks that share every request work in lockstep as one station; where each request stays
on one rank they are stations of their own, and models are dealt over them. Weights ranks are one station (TP). Two
pools on a single GPU are one station, where nothing overlaps.
static, elastic: hosting and sizes of `planner/layouts.py`; every model has a decode lane of its own. Static models keep
to their own memory; elastic ones share what their GPUs have left (kvcached-like). Steps that meet on a GPU share it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from crosspool.engine.admission import PageBudget
from crosspool.engine.config import EngineConfig
from crosspool.engine.engine_core import EngineCore
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError
from crosspool.planner.deployment import PlanInput
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.group import Split
from crosspool.planner.layouts import (
    Hosting,
    Room,
    elastic_hosting,
    replica_size,
    room_beside,
    shard_bytes,
    static_hosting,
)
from crosspool.planner.parallelism import kv_parallelism
from crosspool.planner.traffic import PlannedModel
from crosspool.simulator.cost import MonolithicCost, PooledCost, StepCost
from crosspool.simulator.group import Layout, SimulatedGroup, SimulatedModel
from crosspool.simulator.measured import MeasuredTable, sharing_of, whole_with_measurements, with_measurements
from crosspool.simulator.pipeline import Route
from crosspool.simulator.replicas import ReplicatedPages
from crosspool.units import ceil_div, format_bytes


def simulated_group(
    models: Sequence[PlannedModel],
    split: Split,
    plan_input: PlanInput,
    layout: Layout = "crosspool",
    *,
    name: str = "g0",
    max_queue: int = 64,
    measured: MeasuredTable | None = None,
    hosting: Hosting | None = None,
    beside_share: float = 0.0,
) -> SimulatedGroup:
    """The models of one planned group in a layout, on the GPUs of its split.

    measured: tables that replace the roofline, of two pools and of models that lie whole on one GPU. hosting: where
    models of a monolithic layout lie, in place of what the planner would choose. beside_share: of every FFN, on the KV
    GPU, in place of as much KV.

    Raises CapacityError where a monolithic layout, or the KV GPU beside its share, cannot hold the weights.
    """
    if layout == "crosspool":
        group = _pools(models, split, plan_input, measured, max_queue, beside_share)
    else:
        group = _monolithic(models, split, plan_input, layout, measured, max_queue, hosting)
    return replace(group, name=name)


def _config(plan_input: PlanInput, num_frames: int, max_queue: int, num_decode: int, num_prefill: int) -> EngineConfig:
    engine = plan_input.engine
    return EngineConfig(
        kv_budget_bytes=num_frames * engine.frame_bytes,
        frame_bytes=engine.frame_bytes,
        num_decode_lanes=num_decode,
        num_prefill_lanes=num_prefill,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.chunk_tokens,
        max_queue=max_queue,
        admission=plan_input.admission,
        prefix_caching=False,  # a workload has lengths, not tokens: all its prompts would look alike
    )


def _served(model: PlannedModel, kv_rank: str, weights_ranks: Sequence[str], frames_per_page: int) -> ServedModel:
    geometry = model.geometry
    return ServedModel(
        name=model.name,
        spec=model.facts.spec,
        directory=Path(model.entry.model),
        weights_ranks=tuple(weights_ranks),
        page_tokens=geometry.page_tokens,
        frames_per_page=frames_per_page,
        frame_bytes=geometry.frame_bytes,
        kv_rank=kv_rank,
        kv_dtype=model.facts.spec.dtype,
    )


def _pools(
    planned: Sequence[PlannedModel],
    split: Split,
    plan_input: PlanInput,
    measured: MeasuredTable | None,
    max_queue: int,
    beside_share: float,
) -> SimulatedGroup:
    kind = gpu_kind(plan_input.gpus.kind)
    num_kv, num_weights = len(split.kv_ranks), len(split.weights_ranks)
    ways = {model.name: kv_parallelism(model.facts, num_kv, model.entry.kv_parallelism) == "one" for model in planned}
    apart = num_kv > 1 and all(ways.values())
    if num_kv > 1 and any(ways.values()) and not apart:
        alone = next(name for name, one in ways.items() if one)
        raise ValueError(
            f"{alone} keeps requests on one KV rank and other models spread them; give all models of a group the same "
            "kv_parallelism to simulate it"
        )
    num_pools, frames = (num_kv, split.kv_frames) if apart else (1, split.usable_frames + 1)
    shares_gpu = len(split.gpus) == 1
    if beside_share:
        frames -= _frames_beside(planned, split, beside_share)
    stations = ("gpu",) if shares_gpu else (*(split.kv_ranks if apart else ("kv",)), "weights")
    models = []
    for index, model in enumerate(planned):
        pool = index % num_pools
        bound = PooledCost(
            model.facts, kind, num_kv=num_kv // num_pools, num_weights=num_weights, beside_share=beside_share
        )
        cost: StepCost = (
            bound if measured is None else with_measurements(bound, measured, model.entry.model, is_one_gpu=shares_gpu)
        )
        rank = split.kv_ranks[pool] if apart else "kv"
        models.append(
            SimulatedModel(
                served=_served(model, rank, split.weights_ranks, model.geometry.frames_per_page),
                cost=cost,
                route=Route(kv=pool, weights=0 if shares_gpu else num_pools),
                sharing=sharing_of(measured or {}, model.entry.model, model.facts.num_layers),
            )
        )
    engine = plan_input.engine
    return SimulatedGroup(
        name="",
        layout="crosspool",
        models=tuple(models),
        config=_config(plan_input, frames, max_queue, engine.decode_lanes, engine.prefill_lanes),
        stations=stations,
    )


def _frames_beside(planned: Sequence[PlannedModel], split: Split, share: float) -> int:
    """Frames whose memory the FFNs' share on the KV GPU takes."""
    if len(split.kv_ranks) > 1 or len(split.gpus) == 1:
        raise ValueError(
            f"a share of the FFNs beside {len(split.kv_ranks)} KV rank(s) on {len(split.gpus)} GPU(s) cannot be "
            "simulated; use one KV GPU beside others, or leave beside_share out"
        )
    num_bytes = int(share * sum(model.facts.ffn_bytes for model in planned))
    if num_bytes >= split.budget_bytes:
        raise CapacityError(
            f"{share:g} of the FFNs takes {format_bytes(num_bytes)} of the KV GPU, which has "
            f"{format_bytes(split.budget_bytes)} for KV; use a smaller share"
        )
    return ceil_div(num_bytes, split.frame_bytes)


def _monolithic(
    planned: Sequence[PlannedModel],
    split: Split,
    plan_input: PlanInput,
    layout: Layout,
    measured: MeasuredTable | None,
    max_queue: int,
    hosting: Hosting | None,
) -> SimulatedGroup:
    kind, facts = gpu_kind(plan_input.gpus.kind), [model.facts for model in planned]
    room = room_beside(split, len(split.gpus), plan_input.gpus.memory_bytes)
    hosting = hosting or (static_hosting if layout == "static" else elastic_hosting)(facts, room)
    if hosting is None:
        raise CapacityError(
            f"layout {layout} cannot place {len(facts)} models on {room.num_gpus} GPUs; use more GPUs or fewer models"
        )
    homes = {model.name: tuple(gpu for gpu, names in enumerate(hosting) if model.name in names) for model in facts}
    frames = _free_frames(planned, room, hosting, homes, plan_input.engine.frame_bytes)
    models = []
    for model in planned:
        gpus = homes[model.name]
        size = replica_size(model.facts.num_kv_heads, len(gpus))
        per_gpu = max(1, ceil_div(model.geometry.page_bytes, size * model.geometry.frame_bytes))
        bound = MonolithicCost(model.facts, kind, num_gpus=len(gpus), replica_gpus=size)
        models.append(
            SimulatedModel(
                served=_served(model, model.name, [f"gpu{gpu}" for gpu in gpus], per_gpu),
                cost=bound if measured is None else whole_with_measurements(bound, measured, model.entry.model),
                gpus=gpus,
                replica_gpus=size,
                sharing=sharing_of(measured or {}, model.entry.model, model.facts.num_layers),
            )
        )
    owners = [len(names) if layout == "static" else 1 for names in hosting]

    def prepare(core: EngineCore) -> None:
        """Fresh budgets for each core: of each GPU, in equal parts where models do not share it."""
        shared = [PageBudget(count) for count in frames]
        for model in models:
            own = {gpu: PageBudget(frames[gpu] // owners[gpu]) for gpu in model.gpus}
            budgets = [own[gpu] if layout == "static" else shared[gpu] for gpu in model.gpus]
            size = model.replica_gpus
            replicas = [budgets[start : start + size] for start in range(0, len(budgets), size)]
            estimate = core.kv.by_rank[model.name].estimate
            core.kv.by_rank[model.name] = ReplicatedPages(model.served, replicas, estimate)

    return SimulatedGroup(
        name="",
        layout=layout,
        models=tuple(models),
        config=_config(plan_input, max(2, *frames) + 1, max_queue, len(models), len(models)),
        stations=tuple(f"gpu{gpu}" for gpu in range(room.num_gpus)),
        prepare=prepare,
    )


def _free_frames(
    models: Sequence[PlannedModel],
    room: Room,
    hosting: Hosting,
    homes: Mapping[str, tuple[int, ...]],
    frame_bytes: int,
) -> list[int]:
    sizes = {model.name: shard_bytes(model.facts, len(homes[model.name])) for model in models}
    return [max(0, room.bytes_per_gpu - sum(sizes[name] for name in names)) // frame_bytes for names in hosting]
