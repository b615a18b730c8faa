"""What the engine sees of the workers: models go in, steps go in, events come out. Nothing here acts per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosspool.core import SampledToken
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.kv_pool.split import KVSplit
from crosspool.models.spec import DType
from crosspool.pools_config import Route
from crosspool.scheduler.step import StepDescriptor, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlacement:
    """One model and the ranks that hold it: its non-FFN weights on `kv_rank`, FFN slices on `weights_ranks` in order.

    hidden_size: elements of the rows that cross between the pools.
    route: where experts are chosen, on the weights ranks or on the KV rank; then what it chose crosses behind each row,
    up to `choices_width` more elements.
    weights_shares: relative width of each weights rank's slice; none: equal ones. A rank that shares the KV rank's GPU
    takes a smaller one.
    kv_dtype: of the cache, as engine and worker both count it; a backend refuses what it cannot hold.
    kv_peers: the other KV ranks that hold KV of the model, in order. Under the splits `tokens` and `heads` the model's
    home is `kv_rank` and these hold shares; under `one` each is the home of its own sequences.
    exchange_width: most elements that one token crosses with between two KV ranks.
    has_random_weights: the ranks draw weights of the model's shapes, the same each time; no checkpoint is read.
    prefill_ranks: those that hold the whole model to compute chunks of its prompts; kv_row_width: elements of a token's
    KV in a layer, which they hand over; context_tokens: most tokens of one sequence.
    """

    name: str
    directory: Path
    hidden_size: int
    kv_rank: str
    weights_ranks: tuple[str, ...]
    page_tokens: int
    frame_bytes: int
    kv_dtype: DType = "float32"
    weights_shares: tuple[float, ...] = ()
    kv_peers: tuple[str, ...] = ()
    kv_split: KVSplit = "one"
    exchange_width: int = 0
    has_random_weights: bool = False
    route: Route = "ffn"
    choices_width: int = 0
    prefill_ranks: tuple[str, ...] = ()
    kv_row_width: int = 0
    context_tokens: int = 0

    @property
    def crossing_width(self) -> int:
        """Most elements that one token crosses with between the pools; the channels are sized by it."""
        return self.hidden_size + self.choices_width

    @property
    def kv_ranks(self) -> tuple[str, ...]:
        """Every KV rank of the model, in the order in which partial results are added."""
        return (self.kv_rank, *self.kv_peers)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Every rank that holds a part of the model, KV ranks first."""
        return (*self.kv_ranks, *self.weights_ranks, *self.prefill_ranks)

    @property
    def homes(self) -> tuple[str, ...]:
        """The KV ranks that lead steps of the model and exchange hidden states with its weights ranks."""
        return self.kv_ranks if self.kv_split == "one" else (self.kv_rank,)

    def shares(self, home: str) -> tuple[str, ...]:
        """The KV ranks that take part in the steps that `home` leads, beside it."""
        return () if self.kv_split == "one" else self.kv_peers

    def step_ranks(self, home: str, prefill_rank: str | None = None) -> tuple[str, ...]:
        """The ranks that a step led by `home` needs, it first."""
        return (home, *self.shares(home), *self.weights_ranks) if prefill_rank is None else (home, prefill_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReady:
    """Every rank of the placement has loaded its share. Told once for each `add_model`, not after a rank's return."""

    name: str
    seconds: float
    bytes_by_rank: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFailed:
    """The model could not be loaded, or loaded again after a loss; nothing of it stays on any rank.

    is_loss: for want of a rank, whatever the model's files are.
    """

    name: str
    error: str
    is_loss: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """Bytes one rank has loaded of its share of a model."""

    name: str
    rank: str
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """One step of a run has ended on its KV rank, which goes on with the next: its tokens, in row order."""

    lane: int
    step_seq: int
    sampled: tuple[SampledToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A step ended on its KV rank."""

    result: StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailed:
    """A step ended without tokens; nothing it did is visible, so it can be replayed under a new step_seq.

    Of a run: the steps that were told stay, the rest can be replayed.

    waiting_on: the ranks whose flags did not arrive. `error` names rank and cause in one line. `fatal`: the step
    itself raised (a bug or bad input), so a replay would fail again: the engine runs its rows one by one, and those
    that fail alone end with the error.
    """

    lane: int
    step_seq: int
    waiting_on: tuple[str, ...]
    error: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLost:
    """A rank died or hung; it is being restarted. A lost KV rank takes its sequences and pages' contents with it."""

    rank: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReady:
    """A rank (again) holds every model placed on it and its channels are open. A new rank is ready with no model."""

    rank: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBack:
    """A rank that was lost holds this model again and still loads others: steps of this one may run there."""

    rank: str
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailed:
    """A lost rank could not be brought back. Steps that need it fail at once; other models are served on."""

    rank: str
    error: str


Event = (
    ModelReady
    | ModelFailed
    | LoadProgress
    | StepTokens
    | StepDone
    | StepFailed
    | RankLost
    | ModelBack
    | RankReady
    | RankFailed
)


class Cluster(Protocol):
    """The workers of one deployment. Calls return at once; outcomes arrive through `poll`."""

    def add_model(self, placement: ModelPlacement) -> None: ...

    def remove_model(self, name: str) -> None:
        """Free the model's share on every rank. The engine has ended its sequences before."""
        ...

    def load_first(self, models: Sequence[str]) -> None:
        """In which order ranks that come back load their models again, from now on: these first."""
        ...

    def submit(self, step: StepDescriptor) -> None:
        """Hand one step to its lane's ranks. The lane is idle, or runs a single step of the same KV rank.

        In the latter case the step runs once that one is done; if that one fails, it fails right after without having
        run. Each step ends with exactly one StepDone or StepFailed, also when its KV rank is lost (RankLost comes
        first), and a lane's steps end in their order, but for one that fails before it has begun.
        """
        ...

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None: ...

    def map_ahead(self, kv_rank: str, hints: Sequence[Hint]) -> None:
        """Tell a KV rank with mapped frames what models will need soon, and what nobody needs."""
        ...

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        """Let a KV rank copy pages to host memory and back, before the steps that are submitted from now on."""
        ...

    def backing_counts(self) -> dict[str, BackingCounts]:
        """What mapping has done on each KV rank with mapped frames, as last told."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to `timeout_s` for the first, without spinning."""
        ...

    def wake(self) -> None:
        """Make a `poll` in another thread return at once."""
        ...

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by rank and kind, as the workers last reported them."""
        ...

    def close(self) -> None:
        """Stop every rank; nothing of it is left (processes, threads, shared memory)."""
        ...
