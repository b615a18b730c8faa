"""Snapshots of the engine: models, pages, queues, lanes and counters at one moment."""

from dataclasses import dataclass, field
from typing import Literal

from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.split import KVSplit
from crosspool.scheduler.step import Phase

ModelState = Literal["loading", "ready", "draining", "failed"]
LaneState = Literal["idle", "running"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """One model as users see it.

    context_limit: prompt plus output tokens of one sequence; never above what the KV pool can hold for one.
    max_sequences: the most that one caller can have accepted at a time, running and waiting; None: no bound is known.
    loaded_bytes, total_bytes: loading progress over all ranks. created_s: Unix time of `add_model`.
    """

    name: str
    state: ModelState
    context_limit: int
    created_s: float
    kv_rank: str
    weights_ranks: tuple[str, ...]
    kv_bytes_per_token: int
    max_sequences: int | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    bytes_by_rank: dict[str, int] = field(default_factory=dict)
    load_s: float | None = None
    error: str | None = None
    moved_bytes: int = 0  # weights read into the ranks' memory since it was added, loads after a loss included
    experts_by_layer: tuple[int, ...] = ()  # experts that a token goes to; 0 for a dense layer
    kv_peers: tuple[str, ...] = ()  # KV ranks beside kv_rank that hold KV of the model
    kv_split: KVSplit = "one"
    prefill_ranks: tuple[str, ...] = ()  # that hold it whole; without them its prompts run in the pools

    @property
    def kv_ranks(self) -> tuple[str, ...]:
        return (self.kv_rank, *self.kv_peers)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Every rank that holds a part of it, prefill ranks apart."""
        return (*self.kv_ranks, *self.weights_ranks)

    @property
    def homes(self) -> tuple[tuple[str, ...], ...]:
        """The ranks that its steps need, by the KV rank that leads them: it answers while all of one of them are up."""
        if self.kv_split == "one":
            return tuple((kv_rank, *self.weights_ranks) for kv_rank in self.kv_ranks)
        return (self.ranks,)


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """All steps of one model and phase that ended, replays of failed ones counted once. Seconds add up over lanes.

    num_told: the steps whose ffn_s and transfer_s (as in `StepResult`) are known and added up.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_told: int = 0
    attention_s: float = 0.0
    ffn_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFrames:
    """Frames of one model on one KV rank."""

    used: int
    reserved: int
    reusable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStats:
    """Load of one model. used: pages in block tables; reserved: pages promised to its sequences, not yet used."""

    name: str
    num_queued: int
    num_prefilling: int
    num_decoding: int
    num_parked: int  # sequences of steps that wait for a rank
    pages_used: int
    pages_reserved: int
    frames_used: int
    frames_reserved: int
    page_tokens: int
    frames_per_page: int
    prompt_tokens: int  # counters since the model was added
    generated_tokens: int
    num_accepted: int
    num_refused: int
    num_finished: dict[str, int]  # by FinishReason
    pages_reusable: int = 0  # cached pages that no sequence uses
    frames_reusable: int = 0
    prefix_queries: int = 0  # tokens of started requests that were looked for in the prefix cache
    prefix_hits: int = 0  # of them, those that were found and not computed again
    prefix_evictions: int = 0  # pages
    frames_stowed: int = 0  # of host memory, with cached pages that had to make room
    prefix_stowed: int = 0  # pages that went there
    prefix_brought_back: int = 0  # pages that came from there instead of being computed again
    num_preempted: int = 0  # sequences that lost their KV with a rank, to be prefilled again
    frames_floor: int = 0  # kept for the model, on each of its KV ranks
    frames_ceiling: int | None = None  # the most it may hold on each; None: as much as the pool's limits leave
    frames_reach: int = 0  # what one sequence could hold while the other models hold no more than their floors
    frames_by_rank: dict[str, RankFrames] = field(default_factory=dict)
    busy_since_s: float | None = None  # since when admitted sequences have waited for a step of the model to end
    steps: dict[Phase, StepTotals] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """Frames of one KV rank; `used + reserved + reusable + free == budget` at every moment. Frame 0 is not counted.

    used: in block tables, those of several sequences once. reusable: in cached pages that nobody uses, as far as nobody
    was promised their frames: admission takes them like free ones. frames_limit: of the budget, those that all models
    together may hold now. frames_kept: of these, all floors. is_settling: live sequences were promised more than limits
    set since allow, and are ending. host_frames: of the rank's host memory, in all and with stowed pages.
    """

    kv_rank: str
    frame_bytes: int
    frames_budget: int
    frames_used: int
    frames_reserved: int
    frames_free: int
    frames_reusable: int = 0
    frames_limit: int = 0
    frames_kept: int = 0
    is_settling: bool = False
    host_frames_budget: int = 0
    host_frames_used: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStats:
    """What one lane does. since_s: engine clock, when the present step was handed out."""

    lane: int
    phase: Phase
    state: LaneState
    model: str | None
    step_seq: int
    num_seqs: int
    since_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Everything at one moment of the engine's monotonic clock.

    last_step_s: when a step last ended; busy_since_s: since when work has been in flight without a step ending,
    None when nothing is in flight (an idle engine is healthy for ever). ranks_down: rank to the moment it was lost;
    ranks_given_up: those of them that are not started again, with the reason; held_again:
    the models that a rank which is down serves already, while it loads others.
    """

    now_s: float
    models: tuple[ModelStats, ...]
    pools: tuple[PoolStats, ...]
    lanes: tuple[LaneStats, ...]
    num_steps: int
    num_replays: int
    num_stalls: int = 0  # rows left out of a decode step for want of a page; always 0 under `reserve`
    num_ranks_lost: int
    last_step_s: float | None
    busy_since_s: float | None
    ranks_down: dict[str, float]
    ranks_given_up: dict[str, str] = field(default_factory=dict)
    held_again: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backings: dict[str, BackingCounts] = field(default_factory=dict)  # by KV rank with mapped frames
    prefill_switches: dict[str, int] = field(default_factory=dict)  # by prefill rank: models brought in
    recovery_timeout_s: float = 60.0  # how long requests wait for a lost rank
