"""PassCost: steps that run on kernels of the next larger of a few numbers of rows, as captured passes of GPUs do.

Rows that are not in use repeat the first: they choose no further experts, but attention, crossings and sampling take
them like any other. The CUDA backend's numbers are `backends/cuda/steps/passes.py`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from crosspool.planner.roofline import StageTimes
from crosspool.simulator.cost import StepCost, StepWork

UNUSED_FFN_SHARE = 0.27
"""Of what a row in use adds to an FFN, what one that is not adds: the mean of 14 cases of two models, 0.10 to 0.66
(`benchmarks/results/moe_rows_h200_2026-11-30.md`)."""


class PassCost:
    """`cost` of decode steps whose rows are rounded up to one of `rows`, ascending. Larger steps are left alone."""

    def __init__(self, cost: StepCost, rows: Sequence[int]) -> None:
        self._cost, self._rows = cost, rows

    def times(self, work: StepWork) -> StageTimes:
        used = self._cost.times(work)
        index = bisect_left(self._rows, work.num_tokens)
        if work.num_tokens != work.num_sampled or index == len(self._rows) or self._rows[index] == work.num_tokens:
            return used
        rows = self._rows[index]
        longer = rows / work.num_tokens
        whole = self._cost.times(
            StepWork(num_tokens=rows, num_sampled=rows, kv_tokens=work.kv_tokens * longer, pairs=work.pairs * longer)
        )
        return replace(
            whole,
            ffn_s=_part_of_the_way(used.ffn_s, whole.ffn_s),
            beside_s=_part_of_the_way(used.beside_s, whole.beside_s),
        )

    def beside_others(self, work: StepWork) -> float:
        return self._cost.beside_others(work)


def _part_of_the_way(used_s: float, whole_s: float) -> float:
    return used_s + UNUSED_FFN_SHARE * (whole_s - used_s)
