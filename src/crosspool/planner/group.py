"""One group of GPUs: how many hold KV and how many weights, and what is left for KV then.

Pure arithmetic over model facts. Whether the KV left is enough is the caller's question.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from crosspool.errors import CapacityError
from crosspool.planner.facts import ModelFacts
from crosspool.planner.memory import (
    GPUMemory,
    MemoryFigures,
    StepBounds,
    ffn_slice_bytes,
    fill_gpu,
    kv_rank_parts,
    weights_rank_parts,
)
from crosspool.units import ceil_div, format_bytes
from crosspool.weights_pool.placement import SLICE_MULTIPLE

MAX_KV_SEARCHED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUSet:
    """The GPUs of one group, all alike. used_bytes: taken by others already, on each."""

    num_gpus: int
    memory_bytes: int
    used_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"a group has {self.num_gpus} GPUs; it needs at least 1")
        if not 0 <= self.used_bytes < self.memory_bytes:
            raise ValueError(
                f"{format_bytes(self.used_bytes)} of {format_bytes(self.memory_bytes)} GPU memory are in use; "
                "nothing is left to plan with"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A group cut into pools, with all KV that fits. On a single GPU both pools share it.

    kv_frames: of one KV rank, with the one that it keeps back.
    """

    kv_ranks: tuple[str, ...]
    weights_ranks: tuple[str, ...]
    gpus: tuple[GPUMemory, ...]
    kv_frames: int
    frame_bytes: int
    slice_bytes: dict[str, tuple[int, ...]]

    @property
    def usable_frames(self) -> int:
        """Frames of all KV ranks that pages can use: each rank keeps one back."""
        return len(self.kv_ranks) * (self.kv_frames - 1)

    @property
    def budget_bytes(self) -> int:
        return self.usable_frames * self.frame_bytes


def split_group(
    models: Sequence[ModelFacts],
    gpus: GPUSet,
    num_kv: int,
    bounds: StepBounds,
    figures: MemoryFigures,
    prefix: str = "",
) -> Split:
    """`num_kv` GPUs for KV, the others for weights. Raises CapacityError, with the numbers, where it does not fit."""
    shared = gpus.num_gpus == 1
    num_weights = 1 if shared else gpus.num_gpus - num_kv
    if num_kv < 1 or num_weights < 1:
        raise CapacityError(
            f"{gpus.num_gpus} GPUs cannot be {num_kv} KV and {num_weights} weights ranks; use 2 or more"
        )
    slices = _slices(models, num_weights)
    per_rank = [sum(slices[model.name][rank] for model in models) for rank in range(num_weights)]
    kv_parts = kv_rank_parts(models, bounds, figures, num_weights)
    weights_parts = [weights_rank_parts(models, size, bounds, figures, num_kv) for size in per_rank]
    common = {
        "in_use_by_others": gpus.used_bytes,
        "reserve": int(gpus.memory_bytes * figures.reserve_fraction),
    }
    if shared:
        kv_parts = _both(kv_parts, weights_parts[0])
        weights_parts = [kv_parts]
    for parts, size in zip(weights_parts, per_rank, strict=True):
        _check_weights(models, gpus, num_weights, sum(parts.values()) + sum(common.values()) - size, size)
    left = gpus.memory_bytes - sum(kv_parts.values()) - sum(common.values())
    frames = left // bounds.frame_bytes
    if frames < 2:
        taken = ", ".join(f"{name} {format_bytes(size)}" for name, size in (kv_parts | common).items() if size)
        raise CapacityError(
            f"nothing is left for KV on a GPU of {format_bytes(gpus.memory_bytes)}: {taken}; "
            "use larger GPUs, more of them, or fewer models in a group"
        )
    kv_parts = {**kv_parts, "kv_cache": frames * bounds.frame_bytes, **common}
    kv_ranks = tuple(f"{prefix}kv{rank}" for rank in range(num_kv))
    weights_ranks = tuple(f"{prefix}w{rank}" for rank in range(num_weights))
    memory = [fill_gpu(rank, gpus.memory_bytes, kv_parts) for rank in kv_ranks]
    if not shared:
        memory += [
            fill_gpu(rank, gpus.memory_bytes, {**parts, **common})
            for rank, parts in zip(weights_ranks, weights_parts, strict=True)
        ]
    return Split(
        kv_ranks=kv_ranks,
        weights_ranks=weights_ranks,
        gpus=tuple(memory),
        kv_frames=frames,
        frame_bytes=bounds.frame_bytes,
        slice_bytes={name: tuple(sizes) for name, sizes in slices.items()},
    )


def smallest_set(
    models: Sequence[ModelFacts], gpus: GPUSet, bounds: StepBounds, figures: MemoryFigures, kv_bytes: int = 0
) -> tuple[int, int] | None:
    """Fewest (KV, weights) GPUs of this kind that hold the models and `kv_bytes` of KV; None if no number does.

    The FFNs need a number of weights GPUs whatever the KV side has, but for channel buffers, which grow with it: so the
    least number with one KV GPU is where the search begins.
    """
    fixed = sum(kv_rank_parts(models, bounds, figures, 1).values()) + gpus.used_bytes
    if fixed + int(gpus.memory_bytes * figures.reserve_fraction) + 2 * bounds.frame_bytes > gpus.memory_bytes:
        return None  # every KV rank holds that much, however many there are
    narrowest = min(model.narrowest_ffn for model in models)
    most_weights = ceil_div(narrowest, SLICE_MULTIPLE)
    found: list[tuple[int, int]] = []
    for num_weights in range(1, most_weights + 1):
        if found and num_weights + 1 > min(sum(pair) for pair in found):
            break
        for num_kv in range(1, MAX_KV_SEARCHED + 1):
            candidate = GPUSet(
                num_gpus=num_kv + num_weights, memory_bytes=gpus.memory_bytes, used_bytes=gpus.used_bytes
            )
            try:
                split = split_group(models, candidate, num_kv, bounds, figures)
            except CapacityError:
                break  # more KV ranks only take more room on the weights ranks
            if split.budget_bytes >= kv_bytes:
                found.append((num_kv, num_weights))
                break
    return min(found, key=lambda pair: (sum(pair), pair[0])) if found else None


def _slices(models: Sequence[ModelFacts], num_weights: int) -> dict[str, list[int]]:
    return {model.name: ffn_slice_bytes(model, num_weights) for model in models}


def _both(kv_parts: dict[str, int], weights_parts: dict[str, int]) -> dict[str, int]:
    """The parts of two ranks on one GPU; the driver's context is needed once."""
    both = {name: kv_parts.get(name, 0) + weights_parts.get(name, 0) for name in kv_parts | weights_parts}
    both["runtime"] = kv_parts["runtime"]
    return both


def _check_weights(models: Sequence[ModelFacts], gpus: GPUSet, num_weights: int, beside: int, size: int) -> None:
    if size + beside <= gpus.memory_bytes:
        return
    room = max(0, gpus.memory_bytes - beside)
    largest = max(models, key=lambda model: model.ffn_bytes)
    ranks = f"{num_weights} weights rank{'s' if num_weights > 1 else ''}"
    offer = f"{ranks} of {format_bytes(gpus.memory_bytes)}, {format_bytes(room)} of each for FFNs"
    if largest.ffn_bytes > num_weights * room:
        raise CapacityError(f"{largest.name} needs {format_bytes(largest.ffn_bytes)} of FFN; {offer}")
    total = sum(model.ffn_bytes for model in models)
    what = f"{len(models)} models need" if len(models) > 1 else f"{largest.name} needs"
    uneven = (
        f", {format_bytes(size)} of it on one rank (slices are multiples of 16)" if total <= num_weights * room else ""
    )
    raise CapacityError(f"{what} {format_bytes(total)} of FFN{uneven}; {offer}")
