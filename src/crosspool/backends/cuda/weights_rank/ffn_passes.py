"""What a weights rank holds of a model, and its pass for a step, on fixed buffers, made where it is new."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.channels.transport import FFNCrossing, begin_pass, end_pass
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN, chunk_routers
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.advance import advance
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.steps.lane import Links, WorkerLane, finish
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.models.spec import ModelSpec, MoEFFNSpec

SumsBy = Literal["words", "flags"]
"""How partial sums reach the peer. words: each carries its epoch, where they fit, else as "flags". flags: written by
the FFN's last kernel, and a small one behind it raises the flag."""


class FFNPass:
    """The kernels of a pass of `rows` rows. takes_choices: experts come with the rows (`route: kv`)."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        half: FFNHalf,
        crossing: FFNCrossing,
        rows: int,
        hidden: int,
        *,
        sums_by: SumsBy = "flags",
        takes_choices: bool = False,
    ) -> None:
        self._kernels, self._lane, self._half, self._crossing = kernels, lane, half, crossing
        self._rows, self._hidden = rows, hidden
        self._sums_by, self._takes_choices = sums_by, takes_choices

    def advance(self, again: int = 0, *, is_first: bool = False) -> None:
        """Enqueue what waits for the next step's rows, or the first one's, and ends the run where none come."""
        flags = [self._crossing.link.inbox.flag]
        advance(self._kernels, self._lane, len(self._half.layers), flags, again=again, is_first=is_first)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        crossing, rows, hidden = self._crossing, self._rows, self._hidden
        begin_pass(self._kernels, self._lane)
        for layer, weights in enumerate(self._half.layers):
            yield layer
            crossing.wait(layer)
            choices = None
            if self._takes_choices and isinstance(weights.spec, MoEFFNSpec):
                choices = crossing.choices(layer, rows, hidden, weights.spec.top_k)
            x = crossing.rows(layer, rows, hidden)
            words = crossing.words(layer, rows, hidden) if self._sums_by == "words" else None
            out = crossing.sums(layer, rows, hidden) if words is None else words
            self._half.run(layer, x, out, departure=crossing.epochs(layer), choices=choices)
            if words is None:
                crossing.signal(layer)
        end_pass(self._kernels, self._lane, len(self._half.layers))


@dataclass
class FFNModel:
    """One model's slice on this rank; each lane has its own scratch, fused passes too."""

    spec: ModelSpec
    layers: tuple[FFNLayerWeights, ...]
    takes_choices: bool = False
    halves: dict[tuple[int, bool], FFNHalf] = field(default_factory=dict)
    routers: Sequence[torch.Tensor | None] | None = None  # of chunks, once there was one
    chunks: dict[int, ChunkFFN] = field(default_factory=dict)
    is_split: bool = False  # over several KV ranks, which run prompts in passes

    def chunk_routers(self) -> Sequence[torch.Tensor | None]:
        """Each layer's router as chunks take it."""
        if self.routers is None:
            self.routers = chunk_routers(self.layers)
        return self.routers


class FFNPassKind(NamedTuple):
    """What a captured pass was made for. is_fused: a layer is one kernel, which holds the whole GPU."""

    bucket: int
    is_fused: bool

    @property
    def is_run(self) -> bool:
        """Whether runs consist of such passes (`ffn_run.py` says why not of fused ones)."""
        return not self.is_fused


class FFNWay(NamedTuple):
    """What a step runs on. links: the one to the KV rank."""

    model_name: str
    model: FFNModel
    lane_number: int
    lane: WorkerLane
    links: Links


class FFNPasses:
    """The passes and chunks of one weights rank's models; each lane has its own."""

    def __init__(self, site: Site, kernels: Launcher, *, is_host_driven: bool) -> None:
        self._site, self._kernels = site, kernels
        # emulated kernels run in turn, and the host sees flags alone
        has_words = site.device.type == "cuda" and not is_host_driven
        self._sums_by: SumsBy = "words" if has_words else "flags"

    def half_of(self, model: FFNModel, lane_number: int, *, is_fused: bool = False) -> FFNHalf:
        """The model's layers for passes of a lane."""
        half = model.halves.get((lane_number, is_fused))
        if half is None:
            half = FFNHalf(self._kernels, model.layers, PASS_TOKENS, fused=is_fused)
            model.halves[lane_number, is_fused] = half
        return half

    def chunks_of(self, model: FFNModel, lane_number: int) -> ChunkFFN:
        """The same for its chunks."""
        found = model.chunks.get(lane_number)
        if found is None:
            found = model.chunks[lane_number] = ChunkFFN(self._kernels, model.layers, model.chunk_routers())
            finish(self._site.device)
        return found

    def find(self, way: FFNWay, kind: FFNPassKind) -> FFNPass:
        """The pass of this kind on this way, captured where there is a GPU."""
        source = way.lane.find_pass(way.model_name, way.links, kind, lambda: self._make(way, kind))
        assert isinstance(source, FFNPass)
        return source

    def _make(self, way: FFNWay, kind: FFNPassKind) -> FFNPass:
        half = self.half_of(way.model, way.lane_number, is_fused=kind.is_fused)
        return FFNPass(
            self._kernels,
            way.lane.memory,
            half,
            FFNCrossing(self._kernels, way.lane.memory, way.links[0].map()),
            kind.bucket,
            way.model.spec.hidden_size,
            sums_by=self._sums_by,
            takes_choices=way.model.takes_choices,
        )
