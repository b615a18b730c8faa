"""ClusterConfig: which ranks there are, where they run, and how long they wait."""

from dataclasses import dataclass

from crosspool.cluster.rank_log import WARNINGS, RankLog
from crosspool.pools_config import Control, HostLayout, KVBacking, StepsAhead, Transport
from crosspool.scheduler.order import ORDER_POLICIES


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """The workers of one deployment. No size here depends on the models: those come and go by `add_model`."""

    layout: HostLayout = "processes"
    kv_ranks: tuple[str, ...] = ("kv0",)
    weights_ranks: tuple[str, ...] = ("w0",)
    prefill_ranks: tuple[str, ...] = ()  # each computes chunks of prompts, one model at a time
    first_prompt_lane: int = 0  # lanes before it only decode; GPUs get no more of them ready for prompts than that
    prefill_lanes: tuple[tuple[int, str], ...] = ()  # (lane, its prefill rank); none: any lane may use any
    prefill_pool_bytes: int = 0  # of each prefill rank's GPU, for whole models that are in place at once
    hosts: tuple[tuple[str, ...], ...] = ()  # ranks that share a thread or process; those not named get one each
    backend: str = "numpy"  # or `cuda`, or a module (`worker.make_worker`)
    num_frames: int  # of each KV rank
    num_host_frames: int = 0  # of each KV rank, for pages that its pool gives up; 0: they are dropped
    frame_bytes: int
    max_tokens_per_step: int
    num_lanes: int = 3  # opened with each model; a step in a further lane opens that lane
    kv_backing: KVBacking = "arena"  # vmm: frames are mapped for each model
    order: str = "priority"
    step_deadline_s: float = 5.0  # how long one wait for a peer may take
    spin_us: float = 200.0  # how long a process looks at its flags before it sleeps; threads of `numpy` do at once
    threads_per_rank: int = 1  # of the linear algebra library
    control: Control = "graphs"  # of decode on GPUs
    steps_ahead: StepsAhead = "host"  # of decode on GPUs that the host does not drive
    transport: Transport = "auto"  # of hidden states between GPUs
    prefill_share: float = 0.7  # of a GPU's multiprocessors, for prompts beside decode
    run_lanes: int = 0  # lanes, from the first on, whose decode steps may come in runs; GPUs get ready for them
    devices: tuple[tuple[str, int], ...] = ()  # (rank, GPU); a rank not named takes its place among the ranks
    joins_halves: bool = False  # a model whose KV rank and only weights rank share a host and a GPU runs undivided
    arenas: tuple[tuple[str, ...], ...] = ()  # KV ranks that share one arena's frames; those not named have one each
    token: str = ""  # under which hosts find an arena that they share, or become a team of NVSHMEM
    start_timeout_s: float = 60.0
    max_failed_starts: int = 3  # in a row, before a rank is given up
    log: RankLog = WARNINGS  # of ranks' processes; threads log as the process does that they are in

    def __post_init__(self) -> None:
        if self.layout not in ("inprocess", "processes"):
            raise ValueError(f"layout is {self.layout!r}; it must be inprocess or processes")
        if not self.kv_ranks or not self.weights_ranks:
            raise ValueError("a cluster needs at least one KV rank and one weights rank")
        if self.kv_backing == "vmm" and len(self.kv_ranks) > 1:
            raise ValueError(f"kv_backing is vmm with {len(self.kv_ranks)} KV ranks; use arena, or one KV rank")
        if self.num_host_frames and (self.kv_backing == "vmm" or self.arenas):
            raise ValueError(
                f"num_host_frames is {self.num_host_frames} with kv_backing {self.kv_backing} and {len(self.arenas)} "
                "shared arenas; host memory for KV needs an arena of each KV rank's own, so set it to 0"
            )
        self._check_names()
        if self.order not in ORDER_POLICIES:
            raise ValueError(f"order is {self.order!r}; it must be one of {', '.join(ORDER_POLICIES)}")
        counts = ("num_frames", "frame_bytes", "max_tokens_per_step", "num_lanes", "threads_per_rank")
        for name in (*counts, "max_failed_starts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.step_deadline_s <= 0 or self.start_timeout_s <= 0 or self.spin_us < 0:
            raise ValueError(
                f"step_deadline_s {self.step_deadline_s} and start_timeout_s {self.start_timeout_s} must be above 0, "
                f"spin_us {self.spin_us} not below"
            )

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.kv_ranks + self.weights_ranks + self.prefill_ranks

    def may_use(self, lane: int, rank: str) -> bool:
        """Whether steps of the lane may need the rank: a prefill lane has one prefill rank, others have none."""
        if rank not in self.prefill_ranks or not self.prefill_lanes:
            return True
        return (lane, rank) in self.prefill_lanes

    @property
    def device_of(self) -> dict[str, int]:
        """Every rank's GPU, for backends that have any."""
        return {rank: idx for idx, rank in enumerate(self.ranks)} | dict(self.devices)

    @property
    def all_hosts(self) -> tuple[tuple[str, ...], ...]:
        """Every host's ranks: the named groups first, then one host for each rank left."""
        grouped = {rank for host in self.hosts for rank in host}
        return self.hosts + tuple((rank,) for rank in self.ranks if rank not in grouped)

    def control_of(self, rank: str) -> Control:
        """What drives decode's steps on this rank.

        No resident server stays on a GPU that a rank of the same process needs too, since it holds all of it while it
        waits for that one's rows; nor where the host that would end it also starts the KV halves which it waits for.
        """
        if self.control != "resident":
            return self.control
        (host,) = [ranks for ranks in self.all_hosts if rank in ranks]
        in_process = self.ranks if self.layout == "inprocess" else host
        on_gpu = [other for other in in_process if self.device_of[other] == self.device_of[rank]]
        has_kv = any(other in self.kv_ranks for other in host)
        return "graphs" if len(on_gpu) > 1 or has_kv else "resident"

    @property
    def all_arenas(self) -> tuple[tuple[str, ...], ...]:
        """Every arena's KV ranks, in the order in which their frames are numbered."""
        grouped = {rank for arena in self.arenas for rank in arena}
        return self.arenas + tuple((rank,) for rank in self.kv_ranks if rank not in grouped)

    def first_frame(self, kv_rank: str) -> int:
        """Number of the rank's frame 0 among all of the deployment."""
        index = next(index for index, arena in enumerate(self.all_arenas) if kv_rank in arena)
        return index * self.num_frames

    def _check_names(self) -> None:
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"rank names {', '.join(self.ranks)} must differ")
        for rank, device in self.devices:
            if rank not in self.ranks or device < 0:
                raise ValueError(f"devices puts {rank!r} on GPU {device}; ranks are {', '.join(self.ranks)}")
        grouped = [rank for host in self.hosts for rank in host]
        for rank in grouped:
            if rank not in self.ranks:
                raise ValueError(f"hosts names rank {rank!r}, which is none of {', '.join(self.ranks)}")
            if grouped.count(rank) > 1:
                raise ValueError(f"rank {rank} appears {grouped.count(rank)} times in hosts; it can live in one only")
        for lane, rank in self.prefill_lanes:
            if rank not in self.prefill_ranks or not 0 <= lane < self.num_lanes:
                ranks = ", ".join(self.prefill_ranks) or "none"
                raise ValueError(
                    f"prefill_lanes gives lane {lane} rank {rank!r}; lanes are 0 to {self.num_lanes - 1}, prefill "
                    f"ranks {ranks}"
                )
        if any(not host for host in self.hosts):
            raise ValueError("hosts holds an empty group; name its ranks or leave it out")
