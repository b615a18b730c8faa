"""RankWorker: the one worker that a rank runs, made by the backend inside the rank's own thread or process."""

import importlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from crosspool.backends.base import (
    AttentionWorker,
    FFNWorker,
    Inlet,
    Outlet,
    PrefillWorker,
    Progress,
    ShareWorker,
)
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import channel_bytes
from crosspool.cluster.config import ClusterConfig
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor, StepHeader
from crosspool.units import align_up

if TYPE_CHECKING:
    from crosspool.backends.cuda.channels.nvshmem_team import Team
    from crosspool.kv_pool.backing.mapped_frames import MappedFrames

DEVICE_DEADLINE = 0.8
"""Part of a step's deadline after which a wait on a device gives up, so that the device is free when the host does."""


TEAM_WIDTH = 4096 + 256
"""Elements a token for which a team has memory in every channel of a lane: a hidden size, and a router's choices."""


class LoadsModels(Protocol):
    """What the workers of both pools have in common."""

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None: ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]: ...


class OpensLinks(Protocol):
    """A worker whose channels lie elsewhere than in the host memory that the cluster gives both ends.

    The two ends of a link may use that region, zeroed, to find each other.
    """

    def open_link(
        self,
        lane: int,
        peer: str,
        region: memoryview,
        capacity: int,
        ring: Callable[[], None],
        is_far: bool = False,
    ) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with `peer`, or new ones in their place.

        is_far: this rank is the second of two KV ranks, which of a link's channels takes the weights rank's.
        """
        ...

    def close_links(self, peer: str) -> None: ...


class MapsPages(Protocol):
    """The KV frames of a rank where they are mapped ahead of need (`kv_pool/backing`)."""

    def hint(self, hints: Sequence[Hint]) -> None:
        """What models will need soon, and what nobody needs."""
        ...

    def counts(self) -> BackingCounts: ...


class CopiesFrames(Protocol):
    """Host memory of a rank for pages that its pool gives up (`kv_pool/host_tier.py`)."""

    def copy(self, copies: Sequence[FrameCopy]) -> None:
        """Carry them out in their order; no step under way uses their frames."""
        ...


class BeginsAhead(Protocol):
    """A worker whose device goes on by itself from one of a lane's steps to the next."""

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """Whether the first segment of the step may run now, while the lane's step before it does.

        It then hands the device all of the step; the second segment runs once the step before has ended here.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank's worker: an attention worker on a KV rank, an FFN worker on a weights rank, or a prefill worker."""

    attention_worker: AttentionWorker | None = None
    ffn_worker: FFNWorker | None = None
    prefill_worker: PrefillWorker | None = None
    links: OpensLinks | None = None  # None: channels in host memory
    share_worker: ShareWorker | None = None  # None: the backend cannot split a model over KV ranks
    mapping: MapsPages | None = None  # None: frames are where they are
    copying: CopiesFrames | None = None  # None: there is no host memory for pages
    ahead: BeginsAhead | None = None  # None: a step begins once the one before it has ended

    @property
    def is_kv(self) -> bool:
        return self.attention_worker is not None

    @property
    def loads(self) -> LoadsModels:
        return self.attention_worker or self.prefill_worker or self.ffn

    @property
    def attention(self) -> AttentionWorker:
        assert self.attention_worker is not None, "a weights rank was given a KV rank's work"
        return self.attention_worker

    @property
    def share(self) -> ShareWorker:
        if self.share_worker is None:
            raise ValueError("this backend does not split a model over KV ranks; use one KV rank")
        return self.share_worker

    @property
    def host_frames(self) -> CopiesFrames:
        assert self.copying is not None, "a rank without host memory was told to copy pages"
        return self.copying

    @property
    def ffn(self) -> FFNWorker:
        assert self.ffn_worker is not None, "a KV rank was given a weights rank's work"
        return self.ffn_worker


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
        control=config.control,
        goes_ahead=config.steps_ahead == "device",
        run_lanes=config.run_lanes,
        prefill_share=config.prefill_share,
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
