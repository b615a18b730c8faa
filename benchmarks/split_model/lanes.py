"""Two lanes through whole steps: how near they come to what the busier pool, or an ideal schedule, allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import Report
from benchmarks.split_model.lanes_at_work import (
    NO_WAITS,
    Busy,
    busy_times,
    moments_together,
    scheduled_ms,
    step_ms_together,
    window_means_ms,
)
from benchmarks.split_model.model import Gpus, SplitModel
from benchmarks.split_model.ways import WAYS, Drawn, split_model
from crosspool.planner.roofline import StageTimes

TARGET, SHALLOW_LIMIT = 0.95, 1.05
STEADY_WINDOW_MS, STEADY_LIMIT = 1000.0, 1.05


@dataclass(frozen=True)
class Case:
    """What a lane runs."""

    drawn: Drawn
    batch: int
    context: int
    layout: str = "1+1"

    @property
    def name(self) -> str:
        layout = "" if self.layout == "1+1" else f".{self.layout}"
        return f"{self.drawn.name}{layout}.b{self.batch}"


@dataclass(frozen=True)
class Lone:
    """A lane alone: milliseconds of a step, and each side's busy time."""

    step: float
    busy: Busy

    @property
    def stages(self) -> StageTimes:
        return self.busy.stages(self.step)


class LanesBench:
    """ways: each is measured with all lanes driven alike. steady_s: how long unlike lanes are watched for drifts."""

    def __init__(
        self, gpus: Gpus, report: Report, ways: Sequence[str], seconds: float, seed: int, steady_s: float = 0.0
    ) -> None:
        self.gpus, self.report, self.ways, self.seconds, self.seed = gpus, report, ways, seconds, seed
        self.steady_s = steady_s
        self._lone: dict[tuple[str, int, str], Lone] = {}

    def equal(self, drawn: Drawn, layout: str, batch: int, context: int) -> None:
        """Two lanes of one model. A gain of 2 is the most that two lanes can have."""
        case = Case(drawn, batch, context, layout)
        is_shared = any(gpu == 0 for gpu, _ in drawn.slices)
        for way in (way for way in self.ways if WAYS[way].shares_a_gpu or not is_shared):
            lone, together = self._lone_of(case, way), self._together((case, case), way)
            gain = sum(lone.step / step for step in together)
            bound = min(2.0, lone.step / lone.busy.bottleneck)
            pair = f"{case.name}+{case.name}.{context // 1024}k.{way}"
            self._busy(f"{case.name}.{context // 1024}k.{way}", lone)
            self.report.metric(f"two_lanes_gain.{pair}", gain, limit=bound, note="(a + f + 2x) / max(a, f), at most 2")
            self.report.metric(f"pipeline_efficiency.{pair}", gain / bound, limit=TARGET, note="the target")
            self.report.metric(f"lane_ms.{pair}.two", sum(together) / 2, limit=2 * lone.busy.bottleneck)
            ideal = scheduled_ms([lone.stages, lone.stages])
            busy = (
                f"attention {lone.busy.attention:.3f}, tail {lone.busy.tail:.3f} of it, ffn {lone.busy.ffn:.3f}, "
                f"{lone.busy.beside:.3f} beside attention"
            )
            print(
                f"{pair}: gain {gain:.3f} of {bound:.3f} ({gain / bound:.1%}); a step {lone.step:.3f} alone "
                f"({busy}), together {together[0]:.3f} and {together[1]:.3f}, scheduled {ideal[0]:.3f} ms",
                flush=True,
            )

    def pair(self, all_drawn: Mapping[str, Drawn], text: str) -> None:
        """Unlike lanes, `a.b1.4k+b.b1.4k`, beside the schedule in which a pool takes a segment at a time."""
        cases = [_case(all_drawn, part) for part in text.split("+")]
        for way in self.ways:
            lone, together = [self._lone_of(case, way) for case in cases], self._together(cases, way)
            ideal = scheduled_ms([lane.stages for lane in lone])
            gain, best = (
                sum(lane.step / step for lane, step in zip(lone, steps, strict=True)) for steps in (together, ideal)
            )
            contexts = dict.fromkeys(f"{case.context // 1024}k" for case in cases)
            pair = f"{'+'.join(case.name for case in cases)}.{'+'.join(contexts)}.{way}"
            self.report.metric(f"two_lanes_gain.{pair}", gain, limit=best, note="of the schedule: a segment at a time")
            self.report.metric(f"pipeline_efficiency.{pair}", gain / best, limit=TARGET, note="the target")
            for case, step, scheduled in zip(cases, together, ideal, strict=True):
                self.report.metric(f"tbt_ms.{pair}.{case.drawn.name}", step, limit=scheduled, note="of the schedule")
            layers = [case.drawn.spec.num_layers for case in cases]
            if len(set(layers)) > 1:
                shallow = layers.index(min(layers))
                over, note = together[shallow] / ideal[shallow], f"{cases[shallow].name}'s, over the schedule's"
                self.report.metric(f"shallow_tbt.{pair}", over, limit=SHALLOW_LIMIT, note=note)
            print(
                f"{pair}: gain {gain:.3f} of {best:.3f} ({gain / best:.1%}); steps {together[0]:.3f} and "
                f"{together[1]:.3f}, scheduled {ideal[0]:.3f} and {ideal[1]:.3f} ms",
                flush=True,
            )
            if self.steady_s > 0:
                self.steady(all_drawn, text, way)

    def steady(self, all_drawn: Mapping[str, Drawn], text: str, way: str) -> None:
        """Unlike lanes for a long time: whether any second of it was slower, as when their phases lock."""
        cases = [_case(all_drawn, part) for part in text.split("+")]
        lanes = self._lanes_of(cases, way)
        together = moments_together(lanes, [case.context for case in cases], self.steady_s)
        for model in lanes:
            model.stop()
        for case, moments in zip(cases, together, strict=True):
            means = window_means_ms(moments, STEADY_WINDOW_MS)
            slowest = max(means) / (sum(means) / len(means))
            metric = f"steady.{text}.{way}.{case.drawn.name}"
            self.report.samples(f"{metric}.window_ms", means)
            note = f"slowest window of {STEADY_WINDOW_MS / 1e3:g} s of {self.steady_s:g} s, over the mean"
            self.report.metric(f"{metric}.slowest_window", slowest, limit=STEADY_LIMIT, note=note)
            print(f"{metric}: {sum(means) / len(means):.3f} ms, slowest window {slowest:.4f} of that", flush=True)

    def _busy(self, name: str, lone: Lone) -> None:
        for label, value in (("one", lone.step), ("attention", lone.busy.attention), ("ffn", lone.busy.ffn)):
            self.report.metric(f"lane_ms.{name}.{label}", value)

    def _lone_of(self, case: Case, way: str) -> Lone:
        key = (case.name, case.context, way)
        if key not in self._lone:
            model = self._model(case, way)
            (step,) = step_ms_together([model], [case.context], self.seconds / 2)
            model.stop()
            del model
            model = self._model(case, way, rule=NO_WAITS)
            busy = busy_times(model)
            model.stop()
            self._lone[key] = Lone(step, busy)
        return self._lone[key]

    def _lanes_of(self, cases: Sequence[Case], way: str) -> list[SplitModel]:
        lanes: list[SplitModel] = []
        for index, case in enumerate(cases):
            beside = lanes[0] if lanes else None
            lanes.append(self._model(case, way, seed=self.seed + index, beside=beside))
        return lanes

    def _together(self, cases: Sequence[Case], way: str) -> list[float]:
        lanes = self._lanes_of(cases, way)
        steps = step_ms_together(lanes, [case.context for case in cases], self.seconds)
        for model in lanes:
            model.stop()
        return steps

    def _model(self, case: Case, way: str, **options: Any) -> SplitModel:
        torch.cuda.empty_cache()
        options = {"seed": self.seed, **options}
        return split_model(self.gpus, case.drawn, way, batch=case.batch, context=case.context, **options)


def _case(all_drawn: Mapping[str, Drawn], text: str) -> Case:
    """`qwen3-30b-a3b.b1.4k`."""
    name, batch, context = text.rsplit(".", 2)
    return Case(all_drawn[name], int(batch[1:]), int(context[:-1]) * 1024)
