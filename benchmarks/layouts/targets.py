"""What two pools are asked for beside the baselines, and what of it a report's figures keep: met, missed, won, lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Report


@dataclass(frozen=True, slots=True)
class Target:
    """A metric and its bound: at most, or with `is_floor` at least."""

    name: str
    bound: float
    is_floor: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_floor else value <= self.bound

    def told(self, value: float) -> str:
        """One line."""
        asked = f"{'at least' if self.is_floor else 'at most'} {self.bound:g}"
        if self.is_met(value):
            return f"{self.name} is {value:.4g}, {asked}"
        return f"{self.name} is {value:.4g}, {asked}: missed by {100 * abs(value / self.bound - 1):.0f} %"


TBT_MS: dict[tuple[str, str], tuple[float, float]] = {
    ("crosspool-1+1", "0.8"): (22.0, 42.0),
    ("crosspool-1+3", "0.8"): (6.0, 12.0),
    ("crosspool-1+3", "2.0"): (12.0, 25.0),
}
"""By layout and rate: P50 and P99 of every model."""
TTFT_MS = {("crosspool-1+1", "0.8"): 170.0}
BELOW_ELASTIC, OF_STATICS_TOKENS, SIMULATED_PERCENT = 8.0, 0.9, 15.0


def targets(models: Sequence[str], rates: Sequence[str]) -> list[Target]:
    found = []
    for (layout, rate), bounds in TBT_MS.items():
        for model in models:
            levels = zip(("p50", "p99"), bounds, strict=True)
            found += [Target(f"tbt_ms.{layout}.{model}.{rate}.{level}", bound) for level, bound in levels]
    found += [Target(f"ttft_ms.{layout}.all.{rate}.p50", bound) for (layout, rate), bound in TTFT_MS.items()]
    for rate in rates:
        for ours in ("crosspool", "crosspool-1+3"):
            found += [Target(f"elastic_over_{ours}.{model}.{rate}", BELOW_ELASTIC, True) for model in models]
        found.append(Target(f"tokens_over_static.crosspool-1+1.{rate}", OF_STATICS_TOKENS, True))
        found += [Target(f"static_over_crosspool-1+1s.{model}.{rate}", 1.0, True) for model in models]
        for layout in ("crosspool-1+1", "crosspool-1+1s", "crosspool-1+3"):
            found += [Target(f"{what}.{layout}.{rate}", 1.0, True) for what in ("served", "k_pool_within")]
    return [*found, Target("sim_error_percent.p99", SIMULATED_PERCENT)]


def mark_targets(report: Report, wanted: Sequence[Target]) -> None:
    """Put each bound beside its figure."""
    for target in wanted:
        if target.name in report.metrics:
            report.limits[target.name] = target.bound


def verdict(report: Report, wanted: Sequence[Target]) -> str:
    """What was asked for: missed first, then met, then not measured; and who wins where against the baselines."""
    found = [(target, report.metrics[target.name]) for target in wanted if target.name in report.metrics]
    missed = [target.told(value) for target, value in found if not target.is_met(value)]
    met = [target.told(value) for target, value in found if target.is_met(value)]
    absent = [target.name for target in wanted if target.name not in report.metrics]
    lost, won = _beside_baselines(report)
    lists = {"Missed": missed, "Met": met, "Losses": lost, "Wins": won, "Not measured": absent}
    return "\n\n".join(
        f"**{name}**\n\n" + "\n".join(f"- {line}" for line in lines) for name, lines in lists.items() if lines
    )


def _beside_baselines(report: Report) -> tuple[list[str], list[str]]:
    """Lines of the ratios where the baseline is better, and of those where it is not."""
    lost: list[str] = []
    won: list[str] = []
    for name, ratio in report.metrics.items():
        what, is_ratio, _ = name.partition(".")[0].partition("_over_")
        if is_ratio:
            ours_is_better = ratio <= 1.0 if what == "ttft" else ratio >= 1.0
            (won if ours_is_better else lost).append(f"{name} is {ratio:.3g}: {report.notes[name]}")
    return lost, won
