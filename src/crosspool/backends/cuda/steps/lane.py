"""What a worker keeps of one lane: its stream, its words, its links and the passes captured for it."""

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from crosspool.backends.base import Inlet, NewLink, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet, DeviceLink, DeviceOutlet, Link, Site
from crosspool.backends.cuda.device.graphs import Capturable, StepGraph, capture
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.loop_graph import Repeatable, capture_loop
from crosspool.backends.cuda.device.queues import DECODE_STREAM_PRIORITY, own_stream, stream_for
from crosspool.backends.cuda.device.sm_partition import PrefillStreams
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule
from crosspool.backends.cuda.steps.segments import SegmentGraphs, capture_segments

Links = tuple[Link, ...]

DECODE_PAUSE_S = 0.05
"""Steps of a decoding lane follow each other faster than this."""


class WorkerLane:
    """One lane of one worker. Passes are kept per model; new channels drop those that were captured for the old.

    `find_pass` may be called from a thread that loads a model while the rank's loop runs steps.
    """

    def __init__(
        self,
        site: Site,
        rule: WaitRule,
        kernels: Launcher,
        *,
        is_host_driven: bool = False,
        goes_ahead: bool = False,
        has_prompts: bool = True,
    ) -> None:
        """is_host_driven: passes are cut at every crossing, after which the host launches the next part.

        goes_ahead: a run may be enqueued behind another one that ends early, and then looks whether it is to begin.
        has_prompts: whether chunks run here too.
        """
        self.site, self._kernels = site, kernels
        self._is_host_driven, self.goes_ahead = is_host_driven, goes_ahead
        is_cuda = site.device.type == "cuda"
        # Graphs keep the priority of the stream that they were captured on; chunks of prompts begin on lower ones.
        self.stream: Any = own_stream(site.device, DECODE_STREAM_PRIORITY) if is_cuda else None
        self._capture_stream: Any = stream_for("captures", site.device) if is_cuda else None
        self._prefill_streams: PrefillStreams | None = None
        if is_cuda and has_prompts:
            # Now, since making a stream may wait for the device, where a lane of a later step may be waiting.
            self._prefill_streams = PrefillStreams(site.driver, site.device, site.partition)
        self._replayed_s = -math.inf
        with on_device(site.device), torch.cuda.stream(self.stream):
            self.memory = LaneMemory(site.device, rule)
        self.idle = LaneIdle(self.memory)
        self.links: dict[str, Link] = {}
        self._lock = threading.Lock()
        self._passes: dict[tuple[str, Links, Hashable], Capturable] = {}
        self._graphs: dict[tuple[str, Links, Hashable], StepGraph | SegmentGraphs] = {}
        self._loops: dict[tuple[str, Links, Hashable], StepGraph] = {}

    def open_link(self, new: NewLink, *, is_kv: bool) -> tuple[DeviceOutlet, DeviceInlet]:
        """is_kv: of the link's two channels, this rank's ends are the KV rank's."""
        self.close_link(new.peer)
        link = DeviceLink(self.site, new.peer, new.region, new.capacity, is_kv)
        self.links[new.peer] = link
        return DeviceOutlet(link, new.ring), DeviceInlet(self.memory, link)

    def close_link(self, peer: str) -> None:
        """Forget the channels with a peer; a pass that still waits for it gives up."""
        link = self.links.pop(peer, None)
        if link is not None:
            if not self.memory.is_drained:
                self.memory.abort_all()
            self._drop(lambda _model, links: link in links)
            link.close()

    def before_begin(self, inlets: Sequence[DeviceInlet]) -> Wait | None:
        """What a new step has to wait for: passes under way, and channels that are not open yet. None, as a rule.

        A turn of the loop costs the host as much as a launch.
        """
        if self.memory.is_drained and all([inlet.link.is_open() for inlet in inlets]):
            return None
        return Wait((self.idle, *inlets), OPEN_EPOCH)

    def holds(self, links: Links) -> bool:
        """Whether these are still the lane's channels: a peer that comes back opens new ones."""
        own = tuple(self.links.values())
        return all(any(link is each for each in own) for link in links)

    def drop(self, model: str) -> None:
        """Forget the passes of a model, after those under way have ended."""
        self._drop(lambda name, _links: name == model)

    @property
    def prefill_streams(self) -> PrefillStreams:
        """Where chunks of this lane run."""
        assert self._prefill_streams is not None, "chunks run on a GPU's streams"
        return self._prefill_streams

    def decodes(self, now_s: float) -> bool:
        """Whether this lane runs passes, or did so just now (time.monotonic)."""
        return now_s - self._replayed_s < DECODE_PAUSE_S

    def _drop(self, is_dropped: Callable[[str, Links], bool]) -> None:
        if self.stream is not None:
            self.stream.synchronize()  # bounded: every wait has a deadline
        if self._prefill_streams is not None:
            self._prefill_streams.synchronize()
        with self._lock:
            for kept in (self._passes, self._graphs, self._loops):
                for key in [key for key in kept if is_dropped(key[0], key[1])]:
                    del kept[key]

    def find_pass(self, model: str, links: Links, key: Hashable, make: Callable[[], Capturable]) -> Capturable:
        """The model's pass over `links` under `key`, made and, on a GPU, captured where it is new."""
        source = self._passes.get((model, links, key))
        if source is not None:
            return source
        with self._lock, on_device(self.site.device):
            source = self._passes.get((model, links, key))
            if source is None:
                with torch.cuda.stream(self.stream):  # what fills new buffers comes before what reads them
                    source = make()
                if self.stream is not None:
                    name = f"{self.site.rank} {model} {key}"
                    self._graphs[model, links, key] = self._capture(source, links, name)
                self._passes[model, links, key] = source
            return source

    def captured(self, model: str, key: Hashable, *, in_loop: bool) -> Capturable | None:
        """The model's pass under `key`, if it was captured, in its loop or alone; over whatever links."""
        kept = self._loops if in_loop else self._graphs
        found = (at for at in tuple(kept) if at[0] == model and at[2] == key)  # a load may add to them meanwhile
        return next((self._passes[at] for at in found), None)

    def _capture(self, source: Capturable, links: Links, name: str) -> StepGraph | SegmentGraphs:
        if not self._is_host_driven:
            return capture(source, self._capture_stream, name)
        flags = [link.map().inbox.flag for link in links]
        return capture_segments(source, self._capture_stream, self._kernels, self.memory, flags, name)

    def run_pass(
        self, model: str, links: Links, key: Hashable, inlets: Sequence[DeviceInlet], base: int
    ) -> Iterable[Wait]:
        """Enqueue the captured pass: whole or, where the host drives it, each half of a layer, between waits."""
        self._replayed_s = time.monotonic()
        graph = self._graphs[model, links, key]
        if isinstance(graph, SegmentGraphs):
            return graph.drive(self.stream, self.memory, inlets, base)
        graph.replay(self.stream)
        return ()

    def find_loop(self, model: str, links: Links, key: Hashable) -> StepGraph:
        """The pass that `find_pass` has found under `key`, in its loop, captured where that is new; GPUs only."""
        loop = self._loops.get((model, links, key)) or self.prepare_loop(model, links, key)
        assert loop is not None, f"no pass of {model} under {key} on these channels"
        return loop

    def prepare_loop(self, model: str, links: Links, key: Hashable) -> StepGraph | None:
        """The same for a load; None where the channels were closed since the pass was found."""
        at = (model, links, key)
        with self._lock, on_device(self.site.device):
            source = self._passes.get(at)
            if source is not None and at not in self._loops:
                name = f"{self.site.rank} {model} {key}"
                assert isinstance(source, Repeatable), f"a {type(source).__name__} does not repeat"
                loop = capture_loop(source, self._capture_stream, name, may_be_skipped=self.goes_ahead)
                self._loops[at] = loop
            return self._loops.get(at)

    def run_loop(self, model: str, links: Links, key: Hashable) -> None:
        """Enqueue the pass in its loop, for all the steps of a run."""
        self._replayed_s = time.monotonic()
        self.find_loop(model, links, key).replay(self.stream)

    def give_up(self, last_epoch: int, behind: int = 0) -> None:
        """End a step's waits on the device; end the process, to be replaced, where the device no longer answers.

        behind: the last epoch of the step before, where that may go on (`LaneMemory.abort`).
        After an error such as an illegal address a process can use its GPU no more, and every later step would fail.
        """
        self.memory.abort(last_epoch, behind)
        if self.stream is not None:
            try:
                self.stream.query()
            except RuntimeError as failure:
                raise SystemExit(
                    f"{self.site.rank}: GPU {self.site.index} is lost to this process: {failure}"
                ) from None

    @property
    def graph_bytes(self) -> int:
        return sum(graph.num_bytes for graph in (*tuple(self._graphs.values()), *tuple(self._loops.values())))

    @property
    def channel_bytes(self) -> int:
        return sum(link.num_bytes for link in tuple(self.links.values()))


class LaneIdle:
    """Arrived once every pass of a lane has ended: what a new step waits for first."""

    def __init__(self, lane: LaneMemory) -> None:
        self._lane = lane

    def arrived(self, epoch: int) -> bool:
        return self._lane.is_drained


def device_inlets(inlets: Iterable[Inlet]) -> tuple[DeviceInlet, ...]:
    """The inlets of a step in rank order, each told its place. Raises TypeError for host channels."""
    found = []
    for index, inlet in enumerate(inlets):
        if not isinstance(inlet, DeviceInlet):
            raise TypeError(f"{type(inlet).__name__} is a channel in host memory; the CUDA workers open their own")
        inlet.index = index
        found.append(inlet)
    return tuple(found)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one where it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def enter(device: torch.device) -> None:
    """Make `device` this thread's own: a new thread otherwise opens a context on GPU 0 beside it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def finish(device: torch.device) -> None:
    """Wait for what this thread enqueued outside lanes, so that every lane finds it done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
