"""The same GPUs used otherwise: static partition, and an elastic pool that keeps weights and KV together.

static: every model has GPUs of its own, the fewest that hold its weights; what is left goes, GPU by GPU, to the model
that sees least. Models that fit one GPU share one where there are more models than GPUs, with a fixed part of its KV.
elastic: weights stay beside KV; every GPU's free memory is shared by the models on it (kvcached-like).
In both, attention with fewer KV heads than GPUs runs as data-parallel replicas, so a request sees a part only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2

from crosspool.planner.facts import ModelFacts
from crosspool.planner.parallelism import monolithic_share_seen
from crosspool.planner.plan import LayoutResult
from crosspool.units import format_bytes

Hosting = Sequence[Sequence[str]]
"""For each GPU, the models that have a shard on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """GPUs of a comparison: memory for weights and KV on each, everything else taken off."""

    num_gpus: int
    bytes_per_gpu: int


def shard_bytes(facts: ModelFacts, num_gpus: int) -> int:
    """Weights of one model on each of `num_gpus` GPUs. Attention is cut by KV heads, and replicated beyond them."""
    replicas_share = min(num_gpus, facts.num_kv_heads)
    return facts.ffn_bytes // num_gpus + facts.kv_pool_weight_bytes // replicas_share


def seen_tokens(facts: ModelFacts, free_bytes: Sequence[float]) -> int:
    """Tokens of one request, given the KV bytes it may use on each of the model's GPUs.

    Heads spread over the GPUs fill all alike. With fewer heads the best replica group counts; a replica of an odd
    number of GPUs takes the next lower power of two that divides.
    """
    num_gpus = len(free_bytes)
    group = floor(num_gpus * monolithic_share_seen(facts.num_kv_heads, num_gpus))
    while num_gpus % group:
        group -= 1
    per_gpu = facts.kv_bytes_per_token / group
    groups = [free_bytes[start : start + group] for start in range(0, num_gpus, group)]
    return max(0, floor(max(min(free) for free in groups) / per_gpu))


def static_hosting(models: Sequence[ModelFacts], room: Room) -> Hosting | None:
    """Models by GPU, each GPU one model's or several small ones'; None where the weights do not fit."""
    fewest = {model.name: _fewest_gpus(model, room) for model in models}
    if any(count is None for count in fewest.values()):
        return None
    by_name = {model.name: model for model in models}
    counts = {name: count for name, count in fewest.items() if count is not None}
    if sum(counts.values()) <= room.num_gpus:
        for _ in range(room.num_gpus - sum(counts.values())):
            poorest = min(counts, key=lambda name: (_seen_alone(by_name[name], counts[name], room), name))
            counts[poorest] += 1
        return [[name] for name in counts for _ in range(counts[name])]
    hosting: list[list[str]] = []
    loads: list[int] = []
    for model in sorted(models, key=lambda model: (-model.weight_bytes, model.name)):
        if counts[model.name] > 1:
            hosting += [[model.name] for _ in range(counts[model.name])]
            loads += [room.bytes_per_gpu] * counts[model.name]
            continue
        fitting = [gpu for gpu, load in enumerate(loads) if load + model.weight_bytes <= room.bytes_per_gpu]
        if len(hosting) < room.num_gpus:
            hosting.append([model.name])
            loads.append(model.weight_bytes)
        elif fitting:
            gpu = min(fitting, key=lambda gpu: (loads[gpu], gpu))
            hosting[gpu].append(model.name)
            loads[gpu] += model.weight_bytes
        else:
            return None
    return hosting if len(hosting) <= room.num_gpus else None


def elastic_hosting(models: Sequence[ModelFacts], room: Room) -> Hosting | None:
    """Shards by GPU: each model over a power of two of GPUs near twice its part of all weights, onto the emptiest.

    None where the weights do not fit.
    """
    mean = sum(model.weight_bytes for model in models) / room.num_gpus
    hosting: list[list[str]] = [[] for _ in range(room.num_gpus)]
    loads = [0] * room.num_gpus
    for model in sorted(models, key=lambda model: (-model.weight_bytes, model.name)):
        degree = 2 ** max(0, round(log2(2 * model.weight_bytes / mean)))
        degree = min(degree, 2 ** floor(log2(room.num_gpus)))
        while degree < room.num_gpus and shard_bytes(model, degree) > room.bytes_per_gpu:
            degree = min(2 * degree, room.num_gpus)
        emptiest = sorted(range(room.num_gpus), key=lambda gpu: (loads[gpu], gpu))[:degree]
        for gpu in emptiest:
            hosting[gpu].append(model.name)
            loads[gpu] += shard_bytes(model, degree)
    return hosting if max(loads) <= room.bytes_per_gpu else None


def evaluate_static(
    models: Sequence[ModelFacts], room: Room, hosting: Hosting | None, weights: Mapping[str, float] | None = None
) -> LayoutResult:
    """KV of each GPU is divided among its models, equally or in proportion to `weights` (such as demand)."""
    if hosting is None:
        return _unplaced("static", models, room)
    free = _free_bytes(models, room, hosting)
    parts = {model.name: (weights or {}).get(model.name, 1.0) or 1.0 for model in models}
    seen = {}
    for model in models:
        mine = [gpu for gpu, names in enumerate(hosting) if model.name in names]
        share = [free[gpu] * parts[model.name] / sum(parts[name] for name in hosting[gpu]) for gpu in mine]
        seen[model.name] = seen_tokens(model, share)
    return _result("static", hosting, free, seen)


def evaluate_elastic(models: Sequence[ModelFacts], room: Room, hosting: Hosting | None) -> LayoutResult:
    """One request may take all that is free on its GPUs while the others are idle."""
    if hosting is None:
        return _unplaced("elastic", models, room)
    free = _free_bytes(models, room, hosting)
    seen = {
        model.name: seen_tokens(model, [free[gpu] for gpu, names in enumerate(hosting) if model.name in names])
        for model in models
    }
    return _result("elastic", hosting, free, seen)


def compare_layouts(
    models: Sequence[ModelFacts], room: Room, demand: Mapping[str, float] | None = None
) -> tuple[LayoutResult, LayoutResult]:
    """Static partition and elastic pool on the same GPUs, each placed by its own rule."""
    static = evaluate_static(models, room, static_hosting(models, room), demand)
    return static, evaluate_elastic(models, room, elastic_hosting(models, room))


def _fewest_gpus(model: ModelFacts, room: Room) -> int | None:
    for count in range(1, room.num_gpus + 1):
        if shard_bytes(model, count) < room.bytes_per_gpu:
            return count
    return None


def _seen_alone(model: ModelFacts, count: int, room: Room) -> int:
    return seen_tokens(model, [float(room.bytes_per_gpu - shard_bytes(model, count))] * count)


def _free_bytes(models: Sequence[ModelFacts], room: Room, hosting: Hosting) -> list[int]:
    degrees = {model.name: sum(model.name in names for names in hosting) for model in models}
    sizes = {model.name: shard_bytes(model, degrees[model.name]) for model in models if degrees[model.name]}
    return [max(0, room.bytes_per_gpu - sum(sizes[name] for name in names)) for names in hosting]


def _result(layout: str, hosting: Hosting, free: Sequence[int], seen: dict[str, int]) -> LayoutResult:
    return LayoutResult(
        layout="static" if layout == "static" else "elastic",
        fits=True,
        note="",
        kv_bytes=sum(free),
        gpus=tuple("+".join(names) or "-" for names in hosting),
        seen_tokens=seen,
    )


def _unplaced(layout: str, models: Sequence[ModelFacts], room: Room) -> LayoutResult:
    needed = sum(model.weight_bytes for model in models)
    return LayoutResult(
        layout="static" if layout == "static" else "elastic",
        fits=False,
        note=f"weights of {format_bytes(needed)} cannot be placed on {room.num_gpus} GPUs of "
        f"{format_bytes(room.bytes_per_gpu)} this way",
        kv_bytes=0,
        gpus=(),
        seen_tokens={model.name: 0 for model in models},
    )
