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
    """`cost` of decode steps in passes of at most the largest of `rows`, ascending, each rounded up to one of them.

    Passes of a step run one after another; prompts' chunks run in none.
    """

    def __init__(self, cost: StepCost, rows: Sequence[int]) -> None:
        self._cost, self._rows = cost, rows

    def times(self, work: StepWork) -> StageTimes:
        if work.num_tokens != work.num_sampled:
            return self._cost.times(work)
        full, rest = divmod(work.num_tokens, self._rows[-1])
        found = [self._pass(_part(work, self._rows[-1]))] * full
        return _one_after_another(found + ([self._pass(_part(work, rest))] if rest else []))

    def _pass(self, work: StepWork) -> StageTimes:
        used, rows = self._cost.times(work), self._rows[bisect_left(self._rows, work.num_tokens)]
        if rows == work.num_tokens:
            return used
        whole = self._cost.times(_part(work, rows))
        return replace(
            whole,
            ffn_s=_part_of_the_way(used.ffn_s, whole.ffn_s),
            beside_s=_part_of_the_way(used.beside_s, whole.beside_s),
        )

    def beside_others(self, work: StepWork) -> float:
        return self._cost.beside_others(work)


def _part(work: StepWork, rows: int) -> StepWork:
    """Decode of so many rows as long as those of `work` on average."""
    share = rows / work.num_tokens
    return StepWork(num_tokens=rows, num_sampled=rows, kv_tokens=work.kv_tokens * share, pairs=work.pairs * share)


def _one_after_another(passes: Sequence[StageTimes]) -> StageTimes:
    return StageTimes(
        num_layers=passes[0].num_layers,
        attention_s=sum(each.attention_s for each in passes),
        ffn_s=sum(each.ffn_s for each in passes),
        crossing_s=sum(each.crossing_s for each in passes),
        tail_s=sum(each.tail_s for each in passes),
        beside_s=sum(each.beside_s for each in passes),
    )


def _part_of_the_way(used_s: float, whole_s: float) -> float:
    return used_s + UNUSED_FFN_SHARE * (whole_s - used_s)
