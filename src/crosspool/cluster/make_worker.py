"""Makes the worker of a rank, by its backend, inside the rank's own thread or process."""

import importlib
import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crosspool.cluster.channel import channel_bytes
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.worker import RankWorker
from crosspool.units import align_up

if TYPE_CHECKING:
    from crosspool.backends.cuda.channels.nvshmem_team import Team
    from crosspool.kv_pool.backing.mapped_frames import MappedFrames

DEVICE_DEADLINE = 0.8
"""Part of a step's deadline after which a wait on a device gives up, so that the device is free when the host does."""

TEAM_WIDTH = 4096 + 256
"""Elements a token for which a team has memory in every channel of a lane: a hidden size, and a router's choices."""


def make_worker(config: ClusterConfig, rank: str) -> RankWorker:
    """The worker of a rank.

    `config.backend` is `numpy`, `cuda`, or a module with `attention_worker(num_frames, frame_bytes)` and
    `ffn_worker(rank)`.
    """
    is_kv = rank in config.kv_ranks
    if rank in config.prefill_ranks and config.backend not in ("numpy", "cuda"):
        raise ValueError(f"{rank} is a prefill rank, which backend {config.backend} does not have; use prefill inline")
    if config.backend == "numpy":
        return _numpy_worker(config, rank)
    if config.backend == "cuda":
        return _cuda_worker(config, rank)
    module = importlib.import_module(config.backend)
    if is_kv:
        return RankWorker(attention_worker=module.attention_worker(config.num_frames, config.frame_bytes))
    return RankWorker(ffn_worker=module.ffn_worker(rank))


def join_workers(config: ClusterConfig, workers: Mapping[str, RankWorker]) -> None:
    """Let a host's workers know each other where the configuration joins halves; only GPUs gain anything by it."""
    if config.backend != "cuda" or not config.joins_halves:
        return
    from crosspool.backends.cuda.workers import join_halves

    for kv_rank, kv in workers.items():
        for weights_rank, weights in workers.items():
            if kv.is_kv and not weights.is_kv and config.device_of[kv_rank] == config.device_of[weights_rank]:
                join_halves(kv.attention, weights.ffn, kv_rank, weights_rank)


def _numpy_worker(config: ClusterConfig, rank: str) -> RankWorker:
    if rank in config.kv_ranks:
        from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker

        sizes = (config.num_frames, config.frame_bytes)
        mapped = _mapped_frames(*sizes) if config.kv_backing == "vmm" else None
        worker = NumpyAttentionWorker(*sizes, rank, config.kv_ranks, mapped, config.num_host_frames)
        return RankWorker(attention_worker=worker, share_worker=worker, mapping=mapped, copying=worker.host_frames)
    if rank in config.prefill_ranks:
        from crosspool.backends.numpy.prefill_worker import NumpyPrefillWorker

        return RankWorker(prefill_worker=NumpyPrefillWorker(rank))
    from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker

    return RankWorker(ffn_worker=NumpyFFNWorker(rank))


def _mapped_frames(num_frames: int, frame_bytes: int) -> "MappedFrames":
    from crosspool.backends.numpy.host_vmm import HostVmmDriver
    from crosspool.kv_pool.backing.mapped_frames import MappedFrames

    return MappedFrames(HostVmmDriver(), num_frames, frame_bytes, mmap.PAGESIZE)


def _team(config: ClusterConfig) -> "Team | None":
    """What the ranks join before they open channels; None where channels need no such thing."""
    if config.transport != "nvshmem":
        return None
    from crosspool.backends.cuda.channels.nvshmem_team import Team
    from crosspool.backends.cuda.channels.symmetric_heap import PART_ALIGNED

    num_links = config.num_lanes * (len(config.ranks) - 1)
    link_bytes = align_up(channel_bytes(config.max_tokens_per_step * TEAM_WIDTH), PART_ALIGNED)
    return Team(config.ranks, config.token, num_links * link_bytes)


def _cuda_worker(config: ClusterConfig, rank: str) -> RankWorker:
    from crosspool.backends.cuda.workers import CudaWorkers

    workers = CudaWorkers(
        rank,
        config.device_of,
        has_processes=config.layout == "processes",
        control=config.control_of(rank),
        goes_ahead=config.steps_ahead == "device",
        run_lanes=config.run_lanes,
        prefill_share=config.prefill_share,
        first_prompt_lane=config.first_prompt_lane,
        order=config.order,
        transport=config.transport,
        team=_team(config),
        deadline_s=config.step_deadline_s * (DEVICE_DEADLINE if rank in config.kv_ranks else 2 * DEVICE_DEADLINE),
    )
    if rank in config.kv_ranks:
        attention, mapping = workers.attention(
            config.num_frames,
            config.frame_bytes,
            config.kv_backing,
            config.first_frame(rank) if len(config.kv_ranks) > 1 else None,
            next((arena for arena in config.arenas if rank in arena), ()),
            config.token,
            config.kv_ranks,
            config.num_host_frames,
        )
        return RankWorker(
            attention_worker=attention,
            links=attention,
            share_worker=attention,
            mapping=mapping,
            copying=attention.host_frames,
            ahead=attention if config.steps_ahead == "device" else None,
        )
    if rank in config.prefill_ranks:
        prefill = workers.prefill(config.prefill_pool_bytes)
        return RankWorker(prefill_worker=prefill, links=prefill)
    ffn = workers.ffn()
    return RankWorker(ffn_worker=ffn, links=ffn, ahead=ffn if config.steps_ahead == "device" else None)
