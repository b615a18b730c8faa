"""The same GPUs used otherwise: static partition, and an elastic pool that keeps weights and KV together.

static: every model has GPUs of its own, the fewest that hold its weights; what is left goes, GPU by GPU, to the model
that sees least. Models that fit one GPU share one where there are more models than GPUs, with a fixed part of its KV.
elastic: weights stay beside KV; every GPU's free memory is shared by the models on it (kvcached-like).
In both, attention with fewer KV heads than GPUs runs as data-parallel replicas, so a request sees a part only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2
from typing import Literal

from crosspool.planner.facts import ModelFacts
from crosspool.planner.group import Split
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


def room_beside(split: Split, num_gpus: int, memory_bytes: int) -> Room:
    """GPU memory for weights and KV together, with the same kept back as the split keeps back."""
    parts = split.gpus[0].parts
    beside = ("activations", "logits", "graphs", "runtime", "in_use_by_others", "reserve")
    return Room(num_gpus=num_gpus, bytes_per_gpu=memory_bytes - sum(parts[name] for name in beside))


def shard_bytes(facts: ModelFacts, num_gpus: int) -> int:
    """Weights of one model on each of `num_gpus` GPUs. Attention is cut by KV heads, and replicated beyond them."""
    replicas_share = min(num_gpus, facts.num_kv_heads)
    return facts.ffn_bytes // num_gpus + facts.kv_pool_weight_bytes // replicas_share


def replica_size(num_kv_heads: int, num_gpus: int) -> int:
    """GPUs that one sequence's cache is spread over: the most that the KV heads fill and that divide the GPUs."""
    size = max(1, floor(num_gpus * monolithic_share_seen(num_kv_heads, num_gpus)))
    while num_gpus % size:
        size -= 1
    return size


def seen_tokens(facts: ModelFacts, free_bytes: Sequence[float]) -> int:
    """Tokens of one request, given the KV bytes it may use on each of the model's GPUs.

    Heads spread over the GPUs fill all alike. With fewer heads the best replica group counts.
    """
    num_gpus = len(free_bytes)
    group = replica_size(facts.num_kv_heads, num_gpus)
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


def evaluate(
    layout: Literal["static", "elastic"],
    models: Sequence[ModelFacts],
    room: Room,
    hosting: Hosting | None,
    weights: Mapping[str, float] | None = None,
) -> LayoutResult:
    """What one request of each model sees.

    static: KV of each GPU is divided among its models, equally or in proportion to `weights` (such as demand).
    elastic: a request may take all that is free on its GPUs while the others are idle. hosting None: not placed.
    """
    if hosting is None:
        needed, each = sum(model.weight_bytes for model in models), format_bytes(room.bytes_per_gpu)
        note = f"weights of {format_bytes(needed)} cannot be placed on {room.num_gpus} GPUs of {each} this way"
        nothing = {model.name: 0 for model in models}
        return LayoutResult(layout=layout, fits=False, note=note, kv_bytes=0, gpus=(), seen_tokens=nothing)
    free = _free_bytes(models, room, hosting)
    parts = {model.name: (weights or {}).get(model.name, 1.0) or 1.0 for model in models}
    seen = {}
    for model in models:
        mine = [gpu for gpu, names in enumerate(hosting) if model.name in names]
        share: list[float] = [free[gpu] for gpu in mine]
        if layout == "static":
            share = [free[gpu] * parts[model.name] / sum(parts[name] for name in hosting[gpu]) for gpu in mine]
        seen[model.name] = seen_tokens(model, share)
    gpus = tuple("+".join(names) or "-" for names in hosting)
    return LayoutResult(layout=layout, fits=True, note="", kv_bytes=sum(free), gpus=gpus, seen_tokens=seen)


def compare_layouts(
    models: Sequence[ModelFacts], room: Room, demand: Mapping[str, float] | None = None
) -> tuple[LayoutResult, LayoutResult]:
    """Static partition and elastic pool on the same GPUs, each placed by its own rule."""
    static = evaluate("static", models, room, static_hosting(models, room), demand)
    return static, evaluate("elastic", models, room, elastic_hosting(models, room))


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
