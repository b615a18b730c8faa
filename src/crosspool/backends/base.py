"""The seams every backend implements: the two workers and the channels between them.

A worker's half of a step is a generator: it runs one segment (one layer's work), yields what the next one waits for,
and ends with its result. So the layer loop reads like the paper - attention, put, wait, add, next layer - while the
rank's loop (`cluster/rank_loop.py`) interleaves any number of lanes in one thread, in the order a pure policy gives.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
R = TypeVar("R")


class Arrival(Protocol):
    """What a half-step may wait for: rows in an inlet, or anything else that comes in its own time, at any epoch."""

    def arrived(self, epoch: int) -> bool:
        """Whether it has come: of an inlet, whether the payload of `epoch`, or of a later one, lies in its slot."""
        ...


class Inlet(Arrival, Protocol):
    """The consumer's end of one channel (one lane, one direction, one producer). Its memory is the consumer's."""

    def take(self, layer: int, num_tokens: int, width: int) -> FloatArray:
        """(num_tokens, width) float32 view of the slot of this layer's parity; valid until two layers later."""
        ...


class Outlet(Protocol):
    """The producer's end of one channel."""

    def put(self, layer: int, epoch: int, payload: FloatArray) -> None:
        """Copy `payload` (num_tokens, width) to the consumer's slot, then raise its flag to `epoch`."""
        ...


class Wait(NamedTuple):
    """What a half-step needs before its next segment: every one of `arrivals` at `epoch`.

    told: tokens of each step of a run that has ended since the last wait; the rank tells them while the run goes on.
    rest: says at any moment (time.monotonic) for how many seconds nobody need look, since a device goes on by itself
    and will hardly have come so far sooner; None, and whenever it says 0: it is to look all the time.
    """

    arrivals: Sequence[Arrival]
    epoch: int
    told: tuple[tuple[SampledToken, ...], ...] = ()
    rest: Callable[[float], float] | None = None

    def satisfied(self) -> bool:
        epoch = self.epoch
        for each in self.arrivals:  # noqa: SIM110 - no generator: looked at thousands of times a second
            if not each.arrived(epoch):
                return False
        return True


@dataclass(frozen=True, slots=True)
class LaneLinks:
    """A worker's ends of one lane's channels for one model, by peer rank, in the model's rank order.

    KV worker: `outlets` are A2F to each weights rank, `inlets` F2A from each. FFN worker: one of each, the KV rank's.
    The exchange is between KV ranks: the home's ends lead to every share, a share's to the home alone.
    """

    outlets: Mapping[str, Outlet]
    inlets: Mapping[str, Inlet]
    exchange_outlets: Mapping[str, Outlet] = field(default_factory=dict)
    exchange_inlets: Mapping[str, Inlet] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewLink:
    """A lane's channels with a peer, for one of their two ranks to open its ends of.

    region: host memory that both ranks map, zeroed: the channels lie in it, or the two ends find each other by it.
    capacity: elements of a slot. ring: called after each put, to wake the peer. is_far: this rank is the second of two
    KV ranks, which of a link's channels takes the weights rank's.
    """

    lane: int
    peer: str
    region: memoryview
    capacity: int
    ring: Callable[[], None]
    is_far: bool = False


HalfStep = Generator[Wait, None, R]

Progress = Callable[[int, int], None]
"""Called while a share loads with (loaded_bytes, total_bytes)."""


class AttentionWorker(Protocol):
    """The KV pool's half: embedding, attention, norms, head, sampling; holds KV and sequences, no FFN weights."""

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load the non-FFN weights. On an error nothing of the model stays loaded."""
        ...

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        """Run the attention half of `step`. Sequence state changes only after the last wait (idempotence)."""
        ...

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Drop sequences that ended; their pages belong to the engine and may already be in others' hands."""
        ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes held, by kind: `attention_weights`, `kv_cache`, `ffn_weights` (always 0 here)."""
        ...


class ShareWorker(Protocol):
    """A KV rank's part in the steps of models whose home is another KV rank. An `AttentionWorker` may be one too."""

    def run_share(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None] | None:
        """Answer the home's rows of every layer; remembers the step's block tables after the last answer.

        None where the home does not wait for any answer of the step; they are remembered then, since the next step may
        come at any time. Raises ValueError for a step that cannot run here.
        """
        ...


class PrefillWorker(Protocol):
    """A whole model beside the pools: computes chunks of prompts and hands their KV over, layer by layer.

    It holds no request state: a sequence's earlier KV comes from its home with each chunk. Crossing n of a step is
    layer n in either direction, and the one after the last layer carries the residual stream of rows that sample.
    """

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load the whole model. On an error nothing of it stays loaded."""
        ...

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None]:
        """Compute a chunk. Raises ValueError for a step that cannot run here."""
        ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes held, by kind: `attention_weights`, `ffn_weights`, `kv_cache` (of the chunk under way)."""
        ...


class FFNWorker(Protocol):
    """The weights pool's half: router, experts, shared experts, dense FFN; holds no request state and no KV.

    Made with its rank's name: the name's place in a placement's `weights_ranks` tells the slice it loads.
    """

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load this rank's slice of every FFN tensor. On an error nothing of the model stays loaded."""
        ...

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        """Run every layer's FFN of one step on this rank's slice of the intermediate dimension."""
        ...

    def remove_model(self, model: str) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes held, by kind: `ffn_weights`, `kv_cache` (always 0 here)."""
        ...
