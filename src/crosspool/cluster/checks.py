"""What the cluster refuses: GPUs that are not there, models that cannot be placed, steps no rank could run. Pure."""

from collections.abc import Mapping

from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.config import ClusterConfig
from crosspool.scheduler.step import StepHeader


def check_devices(device_of: Mapping[str, int], num_gpus: int) -> None:
    """device_of: each rank's GPU. Raises ValueError for one that the machine does not have."""
    beyond = [f"{rank} on GPU {device}" for rank, device in device_of.items() if device >= num_gpus]
    if beyond:
        have = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}, numbered from 0; set gpus or prefill_gpus"
        raise ValueError(f"{', '.join(beyond)}: this machine has {have if num_gpus else 'no GPU; use backend numpy'}")


def check_placement(placement: ModelPlacement, config: ClusterConfig) -> None:
    """Raises ValueError for a rank that is none of its pool's, or that is named twice."""
    pools = (
        (placement.kv_ranks, config.kv_ranks),
        (placement.weights_ranks, config.weights_ranks),
        (placement.prefill_ranks, config.prefill_ranks),
    )
    for ranks, pool in pools:
        for rank in ranks:
            if rank not in pool:
                raise ValueError(
                    f"model {placement.name} is placed on {rank!r}, which is none of {', '.join(pool) or 'no rank'}"
                )
    if not placement.weights_ranks or len(set(placement.weights_ranks)) < len(placement.weights_ranks):
        raise ValueError(f"weights ranks of {placement.name} are {placement.weights_ranks}; name each rank once")
    if len(set(placement.kv_ranks)) < len(placement.kv_ranks):
        raise ValueError(f"KV ranks of {placement.name} are {placement.kv_ranks}; name each rank once")


def check_step(header: StepHeader, placement: ModelPlacement, max_tokens: int) -> None:
    """Raises ValueError for a step with more than `max_tokens`, or of ranks on which its model does not lie."""
    if header.kv_rank not in placement.homes:
        homes = ", ".join(placement.homes)
        raise ValueError(f"step names KV rank {header.kv_rank}, but {header.model} lives on {homes}")
    if header.num_tokens > max_tokens:
        raise ValueError(f"step has {header.num_tokens} tokens, more than max_tokens_per_step {max_tokens}")
    if header.prefill_rank is not None and header.prefill_rank not in placement.prefill_ranks:
        names = ", ".join(placement.prefill_ranks) or "no prefill rank"
        raise ValueError(f"step names prefill rank {header.prefill_rank}, but {header.model} lies on {names}")
