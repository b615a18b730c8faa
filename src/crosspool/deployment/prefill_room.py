"""What prefill ranks on GPUs keep where: models whole in host memory, some of them in place on the device."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from crosspool.backends.cuda.chunks.chunk_support import has_chunk_kernels
from crosspool.backends.cuda.device.gpu_sizes import gpu_sizes
from crosspool.config import DeploymentConfig
from crosspool.deployment.ranks import gpu_of, prefill_ranks
from crosspool.errors import CrossPoolError
from crosspool.models.spec import ModelSpec
from crosspool.models.whole_size import whole_bytes
from crosspool.scheduler.residency import SWITCH_BYTES_PER_S
from crosspool.units import GiB, align_up, format_bytes

BESIDE_BYTES = 4 * GiB
"""On a prefill rank's GPU beside whole models: activations of a chunk, a layer's KV, channels, the driver's context."""


def with_prefill_room(
    config: DeploymentConfig, models: Sequence[ModelSpec], gpu_bytes: Sequence[int] | None = None
) -> DeploymentConfig:
    """The same; where nothing was said, with room on prefill ranks' GPUs for two of its largest, or what is left.

    gpu_bytes: of this machine's GPUs, found out if None. Raises CrossPoolError where one has no room for a model.
    """
    pools = config.pools
    if pools.backend != "cuda" or pools.prefill != "dedicated" or pools.prefill_pool_bytes is not None or not models:
        return config
    if gpu_bytes is None:
        gpu_bytes = gpu_sizes() if pools.layout == "processes" else None  # the driver must not start here before ranks
    sizes = [whole_bytes(spec) for spec in models]
    room = default_room(sizes)
    for rank, gpu in _own_gpus(config).items():
        have = gpu_bytes[gpu] - BESIDE_BYTES if gpu_bytes is not None and gpu < len(gpu_bytes) else room
        if have < max(sizes):
            raise CrossPoolError(
                f"the largest model takes {format_bytes(max(sizes))} whole, and GPU {gpu} of {rank} has "
                f"{format_bytes(max(0, have))} for whole models; use a larger GPU, or prefill inline"
            )
        room = min(room, have)
    return replace(config, pools=replace(pools, prefill_pool_bytes=room))


def _own_gpus(config: DeploymentConfig) -> dict[str, int]:
    """GPUs of the prefill ranks that share theirs with nobody."""
    gpus = gpu_of(config)
    taken = list(gpus.values())
    return {rank: gpus[rank] for rank in prefill_ranks(config) if taken.count(gpus[rank]) == 1}


def default_room(sizes: Sequence[int]) -> int:
    """sizes: of each model whole. For two of the largest."""
    return align_up(2 * max(sizes), GiB)


def has_prompt_kernels(spec: ModelSpec) -> bool:
    """Whether the kernels for prompts on GPUs take the model's heads and experts."""
    return has_chunk_kernels(spec)


def prefill_summary(config: DeploymentConfig, models: Sequence[ModelSpec]) -> str | None:
    """One line on what prefill ranks hold and where, once their room is known; None where there are none on GPUs."""
    pools = config.pools
    if pools.backend != "cuda" or pools.prefill != "dedicated" or not models:
        return None
    room, gpus = pools.prefill_pool_bytes or 0, gpu_of(config)
    sizes = sorted(map(whole_bytes, models), reverse=True)
    num_in_place = sum(total <= room for total in accumulate(sizes))
    where = ", ".join(f"{rank} on GPU {gpus[rank]}" for rank in prefill_ranks(config))
    return (
        f"prompts run on {where}: {format_bytes(sum(sizes))} of models in host memory for each, "
        f"{format_bytes(room)} of its GPU for those in place, {num_in_place} of the largest at once; "
        f"bringing one in takes up to {sizes[0] / SWITCH_BYTES_PER_S:.1f} s"
    )
