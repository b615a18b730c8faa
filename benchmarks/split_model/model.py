"""A model split over the GPUs of one process: attention on one, a slice of every FFN on each of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from benchmarks.gpu_timing import seeded_cache
from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.peer_memory import PlainMemory
from crosspool.backends.cuda.channels.transport import AttentionCrossing, FFNCrossing
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.graphs import Capturable, StepGraph, capture
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import ask_for_queues
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.kv_rank.attention_pass import AttentionPass
from crosspool.backends.cuda.kv_rank.kv_router import KVRouter
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights, RouterWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPass, SumsBy
from crosspool.cluster.channel import channel_bytes
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.spec import ModelSpec
from crosspool.units import MiB

PAGE_TOKENS = 256
SPARE_TOKENS = 256
"""Slots of the cache beyond the context, so that steps have somewhere to go."""


Route = Literal["ffn", "kv"]
"""Where experts are chosen."""


class Gpus:
    """The GPUs of this process, each with its kernels, all reachable from one another."""

    def __init__(self, count: int, num_physical: int | None = None) -> None:
        """num_physical: GPUs that `count` are spread over, where there are fewer; None: each is one."""
        ask_for_queues()
        spread = num_physical or count
        self.devices = [torch.device("cuda", idx % spread) for idx in range(count)]
        self.kernels = [DeviceKernels(device) for device in self.devices]
        driver = Driver("bench")
        for idx in range(spread):
            with torch.cuda.device(idx):
                for peer in range(spread):
                    if peer != idx:
                        driver.enable_peer_access(peer)


@dataclass(frozen=True)
class Side:
    """One rank's lane on its GPU."""

    kernels: DeviceKernels
    lane: LaneMemory
    stream: Any

    @classmethod
    def on(cls, kernels: DeviceKernels, rule: WaitRule) -> Side:
        with torch.cuda.device(kernels.device):
            return cls(kernels, LaneMemory(kernels.device, rule), torch.cuda.Stream(kernels.device))

    def capture(self, source: Capturable) -> StepGraph:
        with torch.cuda.device(self.kernels.device):
            return capture(source, self.stream)

    def replay(self, graph: StepGraph) -> None:
        graph.replay(self.stream)


def _moved(router: RouterWeights | None, device: torch.device) -> RouterWeights | None:
    if router is None:
        return None
    parts = {name: None if part is None else part.to(device) for name, part in vars(router).items()}
    return RouterWeights(**parts)


def open_links(kv: torch.device, weights: Sequence[torch.device], capacity: int) -> tuple[list[LinkMap], list[Any]]:
    """The links as the KV rank sees them, and what keeps their memory."""
    links, kept = [], []
    for device in weights:
        into, out = PlainMemory(channel_bytes(capacity), kv), PlainMemory(channel_bytes(capacity), device)
        links.append(LinkMap(ChannelMap(into.base, capacity), ChannelMap(out.base, capacity)))
        kept += [into, out]
    return links, kept


def drawn_cache(spec: ModelSpec, batch: int, context: int, seed: int, device: torch.device) -> PagedCache:
    """A seeded cache of `batch` sequences with `context` tokens each and some to spare."""
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=2 * MiB)
    return seeded_cache(geometry, batch, context + SPARE_TOKENS, seed, device)


class SplitModel:
    """Decode steps of `batch` rows at `context` tokens, one captured graph a rank."""

    def __init__(
        self,
        gpus: Gpus,
        spec: ModelSpec,
        attention: AttentionWeights,
        slices: Sequence[tuple[int, Sequence[FFNLayerWeights]]],
        *,
        batch: int,
        context: int,
        rule: WaitRule | None = None,
        sums_by: SumsBy = "words",
        route: Route = "ffn",
        fused: bool = False,
        seed: int = 0,
        cache: PagedCache | None = None,
    ) -> None:
        """`slices`: (GPU, weights) of each weights rank in order; attention runs on GPU 0.

        fused: as the server does it, on GPUs that a weights rank has for itself.
        cache: one of `drawn_cache` that models of the same shape share, one after another; else a new one.
        """
        rule = rule or WaitRule(deadline_s=0.3)
        self.spec, self.batch, self.position = spec, batch, context - 1
        self.kv = Side.on(gpus.kernels[0], rule)
        device = gpus.devices[0]
        with torch.cuda.device(device):
            cache = cache or drawn_cache(spec, batch, context, seed, device)
            self.half = AttentionHalf(gpus.kernels[0], spec, attention, cache, batch)
        links, self._kept = open_links(
            device, [gpus.devices[gpu] for gpu, _ in slices], (2 * batch + 32) * spec.hidden_size
        )
        self.links = links
        router = None
        if route == "kv":
            routers = [_moved(layer.router, device) for layer in slices[0][1]]
            router = KVRouter.allocate(self.kv.kernels, self.kv.lane, spec, routers, batch)
        crossing = AttentionCrossing(
            self.kv.kernels, self.kv.lane, links, takes_words=sums_by == "words", router=router
        )
        source = AttentionPass(self.kv.kernels, self.kv.lane, self.half, crossing, samples=True, is_decode=True)
        self.graph = self.kv.capture(source)
        self.weights, self.ffn_graphs, self.ffn_halves = [], [], []
        for (gpu, layers), link in zip(slices, links, strict=True):
            side = Side.on(gpus.kernels[gpu], rule)
            with torch.cuda.device(gpus.devices[gpu]):
                half = FFNHalf(side.kernels, layers, batch, fused=fused and gpu != 0)
                mirrored = LinkMap(link.outbox, link.inbox)
                own = FFNCrossing(side.kernels, side.lane, mirrored)
                own_pass = FFNPass(
                    side.kernels,
                    side.lane,
                    half,
                    own,
                    batch,
                    spec.hidden_size,
                    sums_by=sums_by,
                    takes_choices=route == "kv",
                )
            self.weights.append(side)
            self.ffn_halves.append(half)
            self.ffn_graphs.append(side.capture(own_pass))
        self._step = 0
        torch.cuda.synchronize(device)

    def enqueue(self, token_ids: Sequence[int] | None = None) -> int:
        """One step behind those under way; without ids it takes what the step before it samples. Returns its slot."""
        self._step += 1
        base, layers = 1024 * self._step, self.spec.num_layers
        ids = [-1 - row for row in range(self.batch)] if token_ids is None else list(token_ids)
        self.enqueue_ffn(base)
        self.position += 1
        slot = self.kv.lane.push(base, layers, self.batch, ids, [self.position] * self.batch)
        self.kv.replay(self.graph)
        return slot

    def enqueue_ffn(self, base: int) -> None:
        """The weights ranks' part of a step."""
        for side, graph in zip(self.weights, self.ffn_graphs, strict=True):
            side.lane.push(base, self.spec.num_layers)
            side.replay(graph)

    def rewind(self, context: int) -> None:
        """Next steps write and read as if `context` tokens were cached."""
        self.position = context - 1

    def synchronize(self) -> None:
        self.kv.stream.synchronize()
        for side in self.weights:
            side.stream.synchronize()

    def stop(self) -> None:
        """Leave the GPUs to others."""
        self.synchronize()

    def late(self) -> list[int]:
        """Peers' late epochs on every side; all zero in a healthy run."""
        sides = [self.kv, *self.weights]
        return [side.lane.late_epoch(peer) for side in sides for peer in range(len(self.weights))]


def step_times_ms(model: SplitModel, context: int, steps: int = 24, rounds: int = 4) -> list[float]:
    """Milliseconds from one step's end to the next one's, steps enqueued ahead; the first of each round is left out."""
    samples: list[float] = []
    stream = model.kv.stream
    for number in range(rounds + 1):
        model.rewind(context)
        model.enqueue([100 + row for row in range(model.batch)])
        events = []
        for _ in range(steps):
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            events.append(event)
            model.enqueue()
        model.synchronize()
        if any(model.late()):
            raise RuntimeError("a wait missed its deadline")
        if number:
            samples += [begin.elapsed_time(end) for begin, end in pairwise(events[1:])]
    return samples
