"""What a deployment means for the engine and for the cluster: their configurations, and what these refuse."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.cluster.apart import own_rank
from crosspool.cluster.config import ClusterConfig
from crosspool.config import DeploymentConfig
from crosspool.deployment.preflight import host_bytes_for_models
from crosspool.deployment.ranks import (
    are_apart,
    arenas,
    devices,
    hosts,
    kv_bytes_of_each,
    kv_ranks,
    num_lanes,
    num_slots,
    order,
    prefill_ranks,
    weights_ranks,
)
from crosspool.engine.config import EngineConfig
from crosspool.errors import CrossPoolError
from crosspool.pools_config import BACKEND_DTYPES

BACKEND_NAMES = {"numpy": "NumPy", "cuda": "CUDA"}


CUDA_SPIN_US = 200_000.0
"""A GPU tells of a step's end in memory, so a rank with a step under way looks at it instead of sleeping."""

CUDA_START_TIMEOUT_S = 180.0
"""The first start on a machine compiles the kernels."""


def engine_config(config: DeploymentConfig) -> EngineConfig:
    scheduling = config.scheduling
    num_decode_lanes, num_prefill_lanes = num_lanes(config)
    return EngineConfig(
        kv_budget_bytes=kv_bytes_of_each(config),
        kv_backing=config.pools.kv_backing,
        host_budget_bytes=config.pools.host_pool_bytes,
        frame_bytes=config.pools.frame_bytes,
        kv_ranks=kv_ranks(config),
        prefill_ranks=prefill_ranks(config),
        prefill_pool_bytes=config.pools.prefill_pool_bytes or 0,
        prefill_host_bytes=host_bytes_for_models(config.pools),
        num_decode_lanes=num_decode_lanes,
        num_prefill_lanes=num_prefill_lanes,
        decode_steps=scheduling.decode_steps,
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        rerun_tokens=min(PASS_TOKENS, scheduling.max_num_batched_tokens) if config.pools.backend == "cuda" else 0,
        batch_invariant=scheduling.batch_invariant,
        max_queue=scheduling.max_queue,
        max_queue_per_key=scheduling.max_queue_per_key,
        admission=scheduling.admission,
        default_deadline_s=scheduling.queue_timeout_s,
        recovery_timeout_s=scheduling.recovery_timeout_s,
        prefix_caching=scheduling.enable_prefix_caching,
        seed=scheduling.seed,
    )


def cluster_config(config: DeploymentConfig) -> ClusterConfig:
    """Raises CrossPoolError for a dtype that the backend does not compute in, or KV ranks that it cannot join."""
    pools, dtype = config.pools, BACKEND_DTYPES[config.pools.backend]
    if config.dtype not in ("auto", dtype):
        name = BACKEND_NAMES[pools.backend]
        raise CrossPoolError(f"dtype is {config.dtype}; the {name} backend computes in {dtype}, so use auto or {dtype}")
    engine = engine_config(config)
    cluster = ClusterConfig(
        backend=pools.backend,
        layout=pools.layout,
        kv_ranks=kv_ranks(config),
        kv_backing=pools.kv_backing,
        weights_ranks=weights_ranks(config),
        prefill_ranks=prefill_ranks(config),
        prefill_lanes=tuple(engine.prefill_rank_of.items()),
        prefill_pool_bytes=pools.prefill_pool_bytes or 0,
        hosts=() if are_apart(config) else hosts(config),
        order=order(config),
        num_frames=engine.num_frames,
        num_host_frames=engine.num_host_frames,
        frame_bytes=engine.frame_bytes,
        max_tokens_per_step=engine.max_tokens_per_step,
        num_lanes=engine.num_lanes,
    )
    if pools.backend == "cuda":
        return _on_gpus(cluster, config, engine)
    if pools.layout == "inprocess":
        return replace(cluster, hosts=(cluster.ranks,))  # in threads they would take the interpreter from each other
    return cluster


def _on_gpus(cluster: ClusterConfig, config: DeploymentConfig, engine: EngineConfig) -> ClusterConfig:
    pools = config.pools
    if pools.driven_by == "host" and pools.num_kv_ranks > 1:
        raise CrossPoolError(
            f"control is host with kv_ranks {pools.num_kv_ranks}, whose exchange is a part of graphs; use graphs"
        )
    if pools.driven_by == "host" and engine.decode_steps > 1:
        raise CrossPoolError(
            f"decode_steps is {engine.decode_steps} with control host, which drives every step; leave one of them out"
        )
    cluster = replace(
        cluster,
        control=pools.driven_by,
        steps_ahead=pools.steps_ahead,
        transport=pools.transport,
        token=secrets.token_hex(16),
        first_prompt_lane=engine.num_decode_lanes,
        run_lanes=engine.num_decode_lanes if engine.decode_steps > 1 else 0,
        prefill_share=config.scheduling.prefill_share,
        spin_us=CUDA_SPIN_US,
        start_timeout_s=CUDA_START_TIMEOUT_S,
    )
    return _shared_gpus(cluster, config) if pools.baseline is None else _whole_on_gpus(cluster, config)


def _shared_gpus(cluster: ClusterConfig, config: DeploymentConfig) -> ClusterConfig:
    """Two pools: ranks that share a GPU share a process, since two processes of a GPU only take turns on it."""
    crowded = [group for group in hosts(config) if len(group) > 1 and set(group) & set(weights_ranks(config))]
    if crowded and config.pools.driven_by == "resident":
        raise CrossPoolError(
            f"control is resident with {' and '.join(crowded[0])} on one GPU; a resident FFN server needs one of its "
            "own, so use graphs, or a GPU for each rank"
        )
    return replace(cluster, devices=devices(config))


def _whole_on_gpus(cluster: ClusterConfig, config: DeploymentConfig) -> ClusterConfig:
    """A baseline's models lie whole on one GPU each, where both halves run on one stream."""
    if config.pools.driven_by != "graphs":
        raise CrossPoolError(
            f"control is {config.pools.driven_by} with baseline {config.pools.baseline}; "
            "its models are undivided and have no crossings to drive or to serve, so use graphs"
        )
    if config.pools.layout != "processes":
        raise CrossPoolError(
            f"layout is {config.pools.layout} with baseline {config.pools.baseline} on GPUs; use processes"
        )
    if not are_apart(config):
        return replace(cluster, joins_halves=True, devices=devices(config))
    slots = num_slots(config)
    return replace(
        cluster,
        joins_halves=True,
        kv_ranks=_each_apart(cluster.kv_ranks, slots),
        weights_ranks=_each_apart(cluster.weights_ranks, slots),
        hosts=hosts(config),
        devices=devices(config),
        arenas=arenas(config),
    )


def _each_apart(ranks: Sequence[str], slots: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(own_rank(rank, slot) for rank in ranks for slot in range(slots[rank]))
