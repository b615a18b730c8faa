"""A plan against a running deployment: planned bytes beside those the workers report, rank by rank and kind by kind."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosspool.planner.plan import Plan
from crosspool.units import format_bytes

TOLERANCE = 0.05
KINDS = ("attention_weights", "ffn_weights", "kv_cache")
"""What workers report (`memory_bytes`); the other parts show only in what the driver says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One kind of memory of one rank. measured_bytes 0 where the rank does not report."""

    rank: str
    kind: str
    planned_bytes: int
    measured_bytes: int

    @property
    def relative(self) -> float:
        """Measured over planned, less one."""
        if self.planned_bytes == 0:
            return 0.0 if self.measured_bytes == 0 else float("inf")
        return self.measured_bytes / self.planned_bytes - 1

    def __str__(self) -> str:
        planned, measured = format_bytes(self.planned_bytes), format_bytes(self.measured_bytes)
        return f"{self.rank} {self.kind}: planned {planned}, measured {measured} ({self.relative:+.1%})"


def compare_memory(plan: Plan, measured: Mapping[str, Mapping[str, int]]) -> list[Difference]:
    """Every kind of every planned rank; `measured` is what `Cluster.memory_bytes` returns."""
    return [
        Difference(
            rank=gpu.rank,
            kind=kind,
            planned_bytes=gpu.parts.get(kind, 0),
            measured_bytes=measured.get(gpu.rank, {}).get(kind, 0),
        )
        for group in plan.groups
        for gpu in group.gpus
        for kind in KINDS
        if kind in gpu.parts or kind in measured.get(gpu.rank, {})
    ]


def check_memory(plan: Plan, measured: Mapping[str, Mapping[str, int]], tolerance: float = TOLERANCE) -> None:
    """Raises ValueError naming the largest difference where one exceeds `tolerance`."""
    worst = max(compare_memory(plan, measured), key=lambda item: abs(item.relative))
    if abs(worst.relative) > tolerance:
        raise ValueError(f"the plan does not match what runs: {worst}; plan again with the dtype and models that run")
