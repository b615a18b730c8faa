"""What crosses between the cluster's parent and its ranks. Each message is addressed to, or comes from, one rank.

Messages of one rank arrive in the order in which they were sent. Both ends of a channel therefore see the same channels
at the same step: what the parent opens before a step, it opens before that step on either side.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Doorbell
from crosspool.cluster.region import FileRegion, Region
from crosspool.core import SampledToken
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepResult


@dataclass(frozen=True, slots=True)
class Boot:
    """The first message to a new process: which host it is. Descriptors are those it was started with."""

    config: ClusterConfig
    host: int
    doorbells: tuple[Doorbell, ...]  # of every host, in order, and the parent's
    board: FileRegion
    parent_pid: int
    num_launches: int = 1  # of this host, this one included


@dataclass(frozen=True, slots=True)
class AddModel:
    """Load this rank's share. `load_id` tells one load of a model from the next of the same name."""

    placement: ModelPlacement
    load_id: int


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Free the model's share; a load of it that is under way is given up."""

    model: str


@dataclass(frozen=True, slots=True)
class Step:
    """Run this rank's half: of the descriptor on a KV rank, of its header on a weights rank.

    behind: the step of the lane after which this one runs, 0 for none. If that fails this one ends without having run.
    """

    work: StepDescriptor | StepHeader
    behind: int = 0


def may_wait(message: object) -> bool:
    """Whether a host that naps, since all its ranks wait for devices, may find the message at its next look."""
    return isinstance(message, Step) and message.behind > 0


@dataclass(frozen=True, slots=True)
class AbortStep:
    """End the step if it still runs here. A KV rank answers `StepEnded` if it did; its result else came before."""

    lane: int
    step_seq: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop sequences (KV ranks only)."""

    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MapAhead:
    """Map pages that models will need, take back those that they do not (KV ranks with mapped frames only)."""

    hints: tuple[Hint, ...]


@dataclass(frozen=True, slots=True)
class CopyFrames:
    """Copy pages to host memory and back, in this order, at once (KV ranks only): no step under way uses them."""

    copies: tuple[FrameCopy, ...]


@dataclass(frozen=True, slots=True)
class OpenChannels:
    """Open, or replace, the lane's two channels with `peer`; `capacity` in float32 elements of one slot.

    is_far: the peer is a KV rank that writes the first of them. To a weights rank every peer does.
    """

    lane: int
    peer: str
    capacity: int
    region: Region
    is_far: bool = False


@dataclass(frozen=True, slots=True)
class CloseChannels:
    """Drop the channels of every lane with `peer`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the host of this rank."""


ToRank = (
    Boot
    | AddModel
    | RemoveModel
    | Step
    | AbortStep
    | Forget
    | MapAhead
    | CopyFrames
    | OpenChannels
    | CloseChannels
    | Stop
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The rank has started and takes work."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The host of this rank cannot start or go on, for a reason in one line; its end follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a load is."""

    model: str
    load_id: int
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank holds its share of the model."""

    model: str
    load_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load ended with an error, in one line; nothing of the model stays on this rank."""

    model: str
    load_id: int
    error: str


@dataclass(frozen=True, slots=True)
class StepTold:
    """A KV rank's half ended steps of a run that goes on, with the tokens of each."""

    lane: int
    step_seq: int
    steps: tuple[tuple[SampledToken, ...], ...]


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A KV rank's half ended with tokens. told: those of a run's steps before its last, as far as not told yet."""

    result: StepResult
    told: tuple[tuple[SampledToken, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A half ended without a result: aborted (no `error`), out of time (`waiting_on`), or by an exception (`fatal`)."""

    lane: int
    step_seq: int
    waiting_on: tuple[str, ...] = ()
    error: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes held by kind, as `memory_bytes` of the worker gives them; told whenever a model has come or gone."""

    bytes_by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BackingReport:
    """What mapping has done so far on a KV rank; told after steps, when it has changed."""

    counts: BackingCounts


FromRank = (
    Hello | Ending | Loading | Loaded | LoadFailed | StepTold | StepFinished | StepEnded | MemoryReport | BackingReport
)
