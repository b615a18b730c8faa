"""Lanes of split models at work together: how long their steps take, and how long an ideal schedule would."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.split_model.model import SplitModel
from benchmarks.split_model.resident import ResidentModel
from crosspool.backends.cuda.kernels.sampling import Sampler
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.planner.roofline import StageTimes
from crosspool.scheduler.order import by_ticket
from crosspool.simulator.pipeline import OrderedPipeline, Route

AHEAD, REWIND_AFTER = 6, 128
NO_WAITS = WaitRule(deadline_s=None)


def step_ms_together(lanes: Sequence[SplitModel], context: Sequence[int], seconds: float) -> list[float]:
    """Mean time of each lane's steps while all of them are at work, steps enqueued ahead."""
    return [_mean_ms(moments) for moments in moments_together(lanes, context, seconds)]


def moments_together(lanes: Sequence[SplitModel], context: Sequence[int], seconds: float) -> list[list[float]]:
    """When each lane's steps began, in milliseconds on one clock, while all of them are at work."""
    events: list[list[torch.cuda.Event]] = [[] for _ in lanes]
    done = [0] * len(lanes)
    for model, tokens in zip(lanes, context, strict=True):
        model.rewind(tokens)
        model.enqueue([100 + row for row in range(model.batch)])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for model, own, tokens, index in zip(lanes, events, context, range(len(lanes)), strict=True):
            while done[index] < len(own) and own[done[index]].query():
                done[index] += 1
            if len(own) - done[index] >= AHEAD:
                continue
            event = torch.cuda.Event(enable_timing=True)
            event.record(model.kv.stream)
            own.append(event)
            if len(own) % REWIND_AFTER == 0:
                model.rewind(tokens)
            model.enqueue()
    for model in lanes:
        model.synchronize()
    if any(epoch for model in lanes for epoch in model.late()):
        raise RuntimeError("a wait missed its deadline")
    return _common_window(events)


def _common_window(events: Sequence[Sequence[torch.cuda.Event]]) -> list[list[float]]:
    """Milliseconds of each lane's events, from where all lanes are under way to where the first one ends."""
    origin = events[0][0]
    times = [[origin.elapsed_time(event) for event in own] for own in events]
    begin, end = max(own[min(4, len(own) - 2)] for own in times), min(own[-1] for own in times)
    return [[moment for moment in own if begin <= moment <= end] for own in times]


def _mean_ms(moments: Sequence[float]) -> float:
    if len(moments) < 3:
        raise RuntimeError(f"{len(moments)} steps ended while all lanes were at work; measure for longer")
    return (moments[-1] - moments[0]) / (len(moments) - 1)


def window_means_ms(moments: Sequence[float], window_ms: float) -> list[float]:
    """Mean time of the steps that began in each whole window of so long."""
    starts = np.asarray(moments)
    found = []
    for begin in np.arange(starts[0], starts[-1] - window_ms, window_ms):
        within = starts[(starts >= begin) & (starts < begin + window_ms)]
        found.append(_mean_ms(within.tolist()))
    return found


@dataclass(frozen=True)
class Busy:
    """Milliseconds of one step: what attention and FFN side take without waits, and the tail that is in `attention`.

    beside: of the weights rank on attention's GPU, if there is one; ffn: of the slowest of the others.
    """

    attention: float
    ffn: float
    tail: float
    layers: int
    beside: float = 0.0

    @property
    def bottleneck(self) -> float:
        return max(self.attention + self.beside, self.ffn)

    def stages(self, lone_ms: float) -> StageTimes:
        """For a schedule. lone_ms: of a step with no other lane, which tells what a crossing takes."""
        crossing_ms = max(0.0, lone_ms - self.attention - max(self.ffn, self.beside)) / (2 * self.layers)
        return StageTimes(
            num_layers=self.layers,
            attention_s=(self.attention - self.tail) / self.layers / 1e3,
            ffn_s=self.ffn / self.layers / 1e3,
            crossing_s=crossing_ms / 1e3,
            tail_s=self.tail / 1e3,
            beside_s=self.beside / self.layers / 1e3,
        )


def busy_times(model: SplitModel) -> Busy:
    """Of a model made with NO_WAITS."""
    layers, ids = model.spec.num_layers, [5 + row for row in range(model.batch)]
    model.enqueue(ids)
    model.synchronize()
    kv, attention = model.kv, []
    for number in range(8):
        kv.lane.push(1024 * (10 + number), layers, model.batch, ids, [model.position] * model.batch)
        attention.append(_launch_ms(kv.stream, partial(model.graph.replay, kv.stream)))
    ffn, beside = _ffn_ms(model)
    return Busy(_median(attention), ffn, _tail_ms(model), layers, beside)


def _ffn_ms(model: SplitModel) -> tuple[float, float]:
    """(of the slowest weights rank with a GPU of its own, of the one beside attention)."""
    if isinstance(model, ResidentModel):
        passes, first = 12, 100
        model.stop()
        model.enqueue_ffn(1024 * (first - 1))  # the server is there
        while not all(side.lane.is_drained for side in model.weights):
            time.sleep(0)
        begin = time.perf_counter()
        for number in range(passes):
            model.enqueue_ffn(1024 * (first + number))
        while not all(side.lane.is_drained for side in model.weights):
            time.sleep(0)
        return (time.perf_counter() - begin) * 1e3 / passes, 0.0
    slowest, beside = 0.0, 0.0
    for side, graph in zip(model.weights, model.ffn_graphs, strict=True):
        times = []
        for number in range(8):
            side.lane.push(1024 * (100 + number), model.spec.num_layers)
            times.append(_launch_ms(side.stream, partial(graph.replay, side.stream)))
        if side.kernels is model.kv.kernels:
            beside = _median(times)
        else:
            slowest = max(slowest, _median(times))
    return slowest, beside


def _tail_ms(model: SplitModel) -> float:
    """Head and sampling, as a graph of their own."""
    half, kernels = model.half, model.kv.kernels
    with torch.cuda.device(kernels.device):
        sample = Sampler(kernels, model.batch, model.spec.vocab_size, kernels.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=model.kv.stream):
            sample(half.logits())
        return _median([_launch_ms(model.kv.stream, graph.replay) for _ in range(8)])


def _launch_ms(stream: torch.cuda.Stream, launch: Callable[[], None]) -> float:
    """Of what `launch` enqueues on the stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        launch()
        end.record()
    stream.synchronize()
    return float(begin.elapsed_time(end))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def scheduled_ms(stages: Sequence[StageTimes], steps: int = 60) -> list[float]:
    """Mean time of each lane's steps where a pool takes one segment at a time, in order of readiness."""
    pipeline, route = OrderedPipeline(2, len(stages), by_ticket), Route(kv=0, weights=1)
    ends: list[list[float]] = [[] for _ in stages]
    for lane, times in enumerate(stages):
        pipeline.start(lane, times, route, lane * times.attention_s)
    while min(len(own) for own in ends) < steps:
        ended = pipeline.advance(float("inf"))
        assert ended is not None
        ends[ended].append(pipeline.now_s * 1e3)
        pipeline.start(ended, stages[ended], route, pipeline.now_s)
    begin, end = max(own[4] for own in ends), min(own[-1] for own in ends)
    return [_mean_ms([moment for moment in own if begin <= moment <= end]) for own in ends]
