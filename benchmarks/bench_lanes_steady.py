"""Do the phases of two lanes at one FFN server lock over minutes? Attention is a pause, on one GPU.

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_lanes_steady [--pairs a+b,...] [--seconds 120] [--out FOLDER]

Lanes have the layer counts of the models; a few layers' weights stand for all of a model. Every lane's attention is a
kernel of its own, so the schedule that a pair is compared with has an attention station for each lane and one FFN
station, which takes segments in order of readiness. What a segment and a crossing take is measured first: a server busy
with two lanes without pauses, and a lone lane with them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.crossings.asked_lane import AskedLane
from benchmarks.crossings.ffn_client import STEP
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer
from crosspool.planner.roofline import StageTimes
from crosspool.scheduler.order import by_ticket
from crosspool.simulator.pipeline import OrderedPipeline, Route

DRAWN_LAYERS, SEED, AHEAD = 12, 7, 20
WARM_UP_S, WINDOW_S, TARGET, SHALLOW_LIMIT, STEADY_LIMIT = 0.1, 10.0, 0.95, 1.05, 1.05
PAUSE_US = {"qwen3-30b-a3b": 17, "glm-4.7-flash": 26, "deepseek-v2-lite": 19}
"""What a layer's attention half takes behind a wait, batch 1 and 4K (`benchmarks/results/attention_half_h200_*`)."""
PAIRS = (
    *("qwen3-30b-a3b+deepseek-v2-lite", "qwen3-30b-a3b+glm-4.7-flash", "deepseek-v2-lite+glm-4.7-flash"),
    *("qwen3-30b-a3b+qwen3-30b-a3b", "deepseek-v2-lite+deepseek-v2-lite", "glm-4.7-flash+glm-4.7-flash"),
)
Stamps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Model:
    """Two lanes of one model, and what one of its segments takes."""

    name: str
    lanes: tuple[AskedLane, AskedLane]
    pause_us: int
    ffn_us: float
    lone_ms: float

    @property
    def num_layers(self) -> int:
        return len(self.lanes[0].layers)

    @property
    def stages(self) -> StageTimes:
        crossing_us = max(0.0, 1e3 * self.lone_ms / self.num_layers - self.pause_us - self.ffn_us) / 2
        return StageTimes(
            num_layers=self.num_layers,
            attention_s=self.pause_us / 1e6,
            ffn_s=self.ffn_us / 1e6,
            crossing_s=crossing_us / 1e6,
            tail_s=0.0,
        )


class Running:
    """Lanes at work at a server of their own: `turn` keeps them so."""

    def __init__(self, gpus: OneGpu, lanes: Sequence[AskedLane], passes: Sequence[int], pauses: Sequence[int]) -> None:
        self._lanes, self._left = lanes, list(passes)
        self._server = FFNServer(lanes[0].side.kernels, gpus.devices[0], [lane.side.lane for lane in lanes])
        self._server.reserve(max(lane.served.smem_bytes for lane in lanes))
        params = [lane.params(count, pause) for lane, count, pause in zip(lanes, passes, pauses, strict=True)]
        torch.cuda.synchronize()
        for lane in lanes:
            self._post(lane)
        for lane, each in zip(lanes, params, strict=True):
            lane.ask(each)

    def _post(self, lane: AskedLane) -> None:
        at = self._lanes.index(lane)
        if self._left[at] and lane.base - lane.side.lane.done_epoch < STEP * AHEAD:
            lane.post(self._server)
            self._left[at] -= 1

    def turn(self) -> bool:
        """Post what there is room for; whether all lanes have passes left to be posted."""
        for lane in self._lanes:
            self._post(lane)
            lane.check()
        return all(self._left)

    def end(self) -> list[Stamps]:
        """Let what is left run out. Returns when passes of each lane began, in nanoseconds."""
        while any(self._left):
            self.turn()
        for lane in self._lanes:
            lane.kv.stream.synchronize()
            lane.check()
        self._server.stop()
        return [lane.stamps.numpy().copy() for lane in self._lanes]


def together(gpus: OneGpu, lanes: Sequence[AskedLane], passes: int, pause_us: int) -> float:
    """Milliseconds of a pass while equal lanes are at work."""
    running = Running(gpus, lanes, [passes] * len(lanes), [pause_us] * len(lanes))
    steps = means_ms(running.end(), 0.0, float("inf"))
    return sum(steps) / len(steps)


def means_ms(stamps: Sequence[Stamps], begin_s: float, end_s: float) -> list[float]:
    """Mean pass of each lane in that time since all lanes were at work and clocks up, as far as all of them were."""
    done = [each[each > 0] for each in stamps]
    first = max(each[min(8, len(each) - 2)] for each in done)
    last = min(each[-1] for each in done)
    warm = first + 1e9 * WARM_UP_S
    low, high = warm + 1e9 * begin_s, min(float(last), warm + 1e9 * end_s)
    found = []
    for each in done:
        within = each[(each >= low) & (each <= high)]
        if len(within) < 3:
            raise RuntimeError(f"{len(within)} passes ended while all lanes were at work; measure for longer")
        found.append(float(within[-1] - within[0]) / 1e6 / (len(within) - 1))
    return found


def scheduled_ms(stages: Sequence[StageTimes], steps: int = 400) -> list[float]:
    """Mean time of each lane's passes with an attention station for each and one for all FFN."""
    pipeline = OrderedPipeline(len(stages) + 1, len(stages), by_ticket)
    routes = [Route(kv=lane, weights=len(stages)) for lane in range(len(stages))]
    ends: list[list[float]] = [[] for _ in stages]
    for lane, times in enumerate(stages):
        pipeline.start(lane, times, routes[lane], lane * times.attention_s)
    while min(len(own) for own in ends) < steps:
        ended = pipeline.advance(float("inf"))
        assert ended is not None
        ends[ended].append(pipeline.now_s * 1e3)
        pipeline.start(ended, stages[ended], routes[ended], pipeline.now_s)
    begin, end = max(own[8] for own in ends), min(own[-1] for own in ends)
    within = [[moment for moment in own if begin <= moment <= end] for own in ends]
    return [(own[-1] - own[0]) / (len(own) - 1) for own in within]


class SteadyBench:
    def __init__(self, gpus: OneGpu, report: Report, names: Sequence[str]) -> None:
        self.gpus, self.report = gpus, report
        self.models = {name: self._model(name) for name in names}

    def _model(self, name: str) -> Model:
        spec, pause_us = full_spec(name), PAUSE_US[name]
        drawn = random_ffn_weights(full_spec(name, DRAWN_LAYERS), SEED, self.gpus.devices[0])
        again = [drawn[-1 - idx % (DRAWN_LAYERS - 2)] for idx in range(spec.num_layers - DRAWN_LAYERS)]
        layers = (*drawn, *again)
        one, two = (AskedLane(self.gpus, layers, 1, "resident", seed) for seed in (1, 2))
        ffn_us = 1e3 * together(self.gpus, (one, two), 80, 0) / 2 / spec.num_layers
        model = Model(name, (one, two), pause_us, ffn_us, together(self.gpus, (one,), 80, pause_us))
        self.report.metric(f"lanes_steady.{name}.ffn_us", ffn_us, note="a busy server's time for a layer")
        self.report.metric(f"lanes_steady.{name}.lone_ms", model.lone_ms, note=f"{spec.num_layers} layers, one lane")
        print(f"{name}: ffn {ffn_us:.1f} us, pause {pause_us}, alone {model.lone_ms:.3f} ms", flush=True)
        return model

    def pair(self, pair: str, seconds: float) -> None:
        first, second = (self.models[name] for name in pair.split("+"))
        models, lanes = (first, second), (first.lanes[0], second.lanes[1])
        ideal = scheduled_ms([model.stages for model in models])
        best = sum(model.lone_ms / step for model, step in zip(models, ideal, strict=True))

        def efficiency(steps: Sequence[float]) -> float:
            return sum(model.lone_ms / step for model, step in zip(models, steps, strict=True)) / best

        passes = [max(40, int(1e3 * seconds / step)) for step in ideal]
        running, windows, begin_s = Running(self.gpus, lanes, passes, [each.pause_us for each in models]), [], 0.0
        begun_s = time.perf_counter()
        while running.turn():
            if time.perf_counter() - begun_s > begin_s + WINDOW_S + 0.5:
                steps = means_ms([lane.stamps.numpy() for lane in lanes], begin_s, begin_s + WINDOW_S)
                windows.append(steps)
                print(
                    f"  {pair} {begin_s:.0f} to {begin_s + WINDOW_S:.0f} s: {steps[0]:.4f} and {steps[1]:.4f} ms, "
                    f"{efficiency(steps):.2%} of the schedule",
                    flush=True,
                )
                begin_s += WINDOW_S
        stamps = running.end()
        whole = means_ms(stamps, 0.0, float("inf"))
        self._tell(pair, models, whole, ideal, efficiency(whole))
        if windows:
            self._tell_windows(pair, windows, [efficiency(steps) for steps in windows])

    def _tell(
        self, pair: str, models: Sequence[Model], whole: Sequence[float], ideal: Sequence[float], efficiency: float
    ) -> None:
        report = self.report
        report.metric(
            f"pipeline_efficiency.{pair}.steady", efficiency, limit=TARGET, note="of the schedule; the target"
        )
        for place, (model, step, scheduled) in enumerate(zip(models, whole, ideal, strict=True)):
            report.metric(f"tbt_ms.{pair}.steady.{place}.{model.name}", step, limit=scheduled, note="of the schedule")
        layers = [model.num_layers for model in models]
        over = ""
        if len(set(layers)) > 1:
            shallow = layers.index(min(layers))
            ratio = whole[shallow] / ideal[shallow]
            note = f"{models[shallow].name}'s, over the schedule's"
            report.metric(f"shallow_tbt.{pair}.steady", ratio, limit=SHALLOW_LIMIT, note=note)
            over = f", the shallow one's {ratio:.4f} of it"
        print(
            f"{pair}: {whole[0]:.4f} and {whole[1]:.4f} ms, scheduled {ideal[0]:.4f} and {ideal[1]:.4f}, "
            f"{efficiency:.2%} of it{over}",
            flush=True,
        )

    def _tell_windows(self, pair: str, windows: Sequence[Sequence[float]], each: Sequence[float]) -> None:
        self.report.metric(f"steady.{pair}.windows", len(windows), note=f"of {WINDOW_S:g} s")
        self.report.metric(f"steady.{pair}.worst_efficiency", min(each), limit=TARGET, note="of a window")
        slowest = max(max(own) / (sum(own) / len(own)) for own in zip(*windows, strict=True))
        note = "of a lane, over its mean"
        self.report.metric(f"steady.{pair}.slowest_window", slowest, limit=STEADY_LIMIT, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--seconds", default="120", help="for each pair, or one number for each: 120,20")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pairs = options.pairs.split(",")
    given = [float(part) for part in options.seconds.split(",")]
    seconds = given + [given[-1]] * (len(pairs) - len(given))
    gpus, failures = OneGpu(), dict[str, str]()
    config = {"batch": 1, "pairs": pairs, "seconds": seconds, "pause_us": PAUSE_US, "drawn_layers": DRAWN_LAYERS}
    report = Report("lanes_steady", hardware="h200", config=config, seed=SEED)
    report.summary = "Two lanes at one FFN server for minutes, attention a pause in a kernel of each lane; one H200."
    bench = SteadyBench(gpus, report, list(dict.fromkeys("+".join(pairs).split("+"))))
    for pair, long_s in zip(pairs, seconds, strict=True):
        guarded(pair, lambda pair=pair, long_s=long_s: bench.pair(pair, long_s), failures)  # type: ignore[misc]
        report.write(options.out)
    write_failures(failures, options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
