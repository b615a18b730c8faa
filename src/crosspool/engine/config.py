"""EngineConfig: lanes, batch bounds, queues, admission and recovery of one deployment."""

from dataclasses import dataclass

from crosspool.config import AdmissionPolicy
from crosspool.pools_config import KVBacking
from crosspool.units import MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine may use and how long it waits. Every KV rank has the same budget.

    Raises ValueError, naming value and remedy, for bounds under which no request could run.
    """

    kv_budget_bytes: int = 256 * MiB  # physical KV memory of one KV rank; frame 0 of it is kept for masked lanes
    host_budget_bytes: int = 0  # host memory of each KV rank for cached pages that have to go; 0: they are dropped
    frame_bytes: int = 2 * MiB
    kv_ranks: tuple[str, ...] = ("kv0",)  # in the order in which their frames are numbered, as the cluster has them
    prefill_ranks: tuple[str, ...] = ()  # that compute prompts beside the pools, a prefill lane each
    prefill_pool_bytes: int = 0  # of each prefill rank: what models in place may take; 0: it holds one at a time
    prefill_host_bytes: int | None = None  # of the host's memory, for each prefill rank's models; None: not bounded
    num_decode_lanes: int = 2
    num_prefill_lanes: int = 1
    decode_steps: int = 1  # that a batch may take by itself before the engine hands out more
    max_num_seqs: int = 32  # admitted sequences of one model: the largest decode batch
    max_num_batched_tokens: int = 512  # tokens of one prefill chunk, over all its sequences
    # Of a step that runs generated tokens again, whose KV was lost; 0: they count as a prompt's. Prefill steps of no
    # more tokens run in the pools, on GPUs by decode's kernels.
    rerun_tokens: int = 0
    batch_invariant: bool = False  # prefill steps run one prompt alone
    max_queue: int = 64  # queued sequences of one model; beyond it QueueFullError
    max_queue_per_key: int | None = None  # of them, those of one API key; None: as many as there is place for
    kv_backing: KVBacking = "arena"  # vmm: KV workers are told what to map ahead of need
    admission: AdmissionPolicy = "reserve"
    forecast_quantile: float = 0.95  # of the remaining growth of a sequence, under `forecast`
    ageing_s: float = 2.0  # a queued request that lacks pages holds back later ones after this time
    bypass_window: int = 8  # queued requests behind one that lacks pages that are tried before it has aged
    default_deadline_s: float | None = None  # longest time in the queue, for requests without a deadline
    recovery_timeout_s: float = 60.0  # how long a request waits for a lost rank; 0: an error at once
    prefix_caching: bool = True  # pages of ended sequences serve later ones with the same first tokens
    seed: int | None = None  # of requests without one; None: a fresh one for each

    def __post_init__(self) -> None:
        for name in (
            "num_decode_lanes",
            "num_prefill_lanes",
            "decode_steps",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.rerun_tokens < 0:
            raise ValueError(f"rerun_tokens is {self.rerun_tokens}; it must not be negative")
        if self.prefill_ranks and self.num_prefill_lanes > len(self.prefill_ranks):
            raise ValueError(
                f"num_prefill_lanes is {self.num_prefill_lanes} for {len(self.prefill_ranks)} prefill ranks, each of "
                f"which runs one chunk at a time; set it to {len(self.prefill_ranks)} or less"
            )
        if self.max_queue_per_key is not None and self.max_queue_per_key < 1:
            raise ValueError(f"max_queue_per_key is {self.max_queue_per_key}; it must be at least 1, or left out")
        if self.num_frames < 2:
            raise ValueError(
                f"kv_budget_bytes is {self.kv_budget_bytes}, less than two frames of {self.frame_bytes} bytes; "
                f"set it to {2 * self.frame_bytes} or more"
            )
        if self.host_budget_bytes and self.num_host_frames < 2:
            raise ValueError(
                f"host_budget_bytes is {self.host_budget_bytes}, less than two frames of {self.frame_bytes} bytes; "
                f"set it to {2 * self.frame_bytes} or more, or to 0"
            )
        if not 0.0 < self.forecast_quantile <= 1.0:
            raise ValueError(f"forecast_quantile is {self.forecast_quantile}; it must lie in (0, 1]")
        for name in ("ageing_s", "recovery_timeout_s", "bypass_window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")

    @property
    def max_sequences(self) -> int:
        """Sequences of one model and one API key that can be accepted at a time: those admitted and those queued."""
        waiting = self.max_queue if self.max_queue_per_key is None else min(self.max_queue, self.max_queue_per_key)
        return self.max_num_seqs + waiting

    @property
    def num_frames(self) -> int:
        """Frames of one KV rank, the reserved frame 0 included: the size of a worker's arena."""
        return self.kv_budget_bytes // self.frame_bytes

    @property
    def num_host_frames(self) -> int:
        """Frames of one KV rank's host memory, one that is never used included; 0: there is none."""
        return self.host_budget_bytes // self.frame_bytes

    @property
    def max_tokens_per_step(self) -> int:
        """Most rows of hidden states in one step, which size the channels between the pools."""
        return max(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_lanes(self) -> int:
        return self.num_decode_lanes + self.num_prefill_lanes

    @property
    def prefill_rank_of(self) -> dict[int, str]:
        """The prefill rank of each prefill lane, by the lane's number; empty where there are none."""
        if not self.prefill_ranks:
            return {}
        return {self.num_decode_lanes + number: self.prefill_ranks[number] for number in range(self.num_prefill_lanes)}
