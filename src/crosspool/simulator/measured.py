"""Measured stage times in place of the roofline, by model, stage and number of weights GPUs.

Read from files by `measured_files.py`. Between measured rows times are interpolated, beyond them the roofline's ratio
goes on. Attention is fitted as a constant plus a time for each row and each cached token, on one KV GPU. On numbers of
GPUs that were not measured, and for prefill, what the nearest measurement exceeded its own roofline by is added; where
whole prompts were measured, their stages are as much slower as those prompts were.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crosspool.planner.catalogue import lookup
from crosspool.planner.roofline import StageTimes
from crosspool.simulator.cost import MonolithicCost, PooledCost, StepCost, StepWork, decode_work, prompt_works
from crosspool.simulator.sharing import USUAL, Sharing

Points = tuple[tuple[int, float], ...]
"""(rows, value), rows ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """One model's measured times, in seconds. ffn_s: by number of weights GPUs; crossing_s: one direction.

    lanes_efficiency: what two lanes of the model do together, over what their stage times allow, by rows of each.
    shared_efficiency: the same where a share of the FFN lies beside attention. prefill_s: of a prompt alone, to its
    first token, by its tokens. beside_prompt_s: what a whole decode step takes more while a prompt runs beside it.
    prompt_slower: time of a prompt beside decode over its time alone. whole_s: of a lone token of the model whole on
    one GPU, by its context, the server's own time included. one_gpu_s: the same with both pools on one GPU.
    """

    ffn_s: Mapping[int, Points] = field(default_factory=dict)
    attention_base_s: float | None = None
    attention_token_s: float = 0.0
    attention_row_s: float = 0.0  # beyond the first
    crossing_s: Points = ()
    tail_s: float | None = None
    lanes_efficiency: Points = ()
    shared_efficiency: Points = ()
    prefill_s: Points = ()
    beside_prompt_s: float | None = None
    prompt_slower: float | None = None
    whole_s: Points = ()
    one_gpu_s: Points = ()


MeasuredTable = Mapping[str, MeasuredModel]


class MeasuredCost:
    """A roofline corrected by what was measured.

    is_whole: undivided on one GPU, where nothing crosses. lone_s: of lone tokens, by context; steps are as much slower
    than their stages as the first of these.
    """

    def __init__(
        self, roofline: PooledCost, measured: MeasuredModel, *, is_whole: bool = False, lone_s: Points = ()
    ) -> None:
        self._roofline, self._measured, self._is_whole = roofline, measured, is_whole
        self._points: Points = ()
        self._ffn_roofline = roofline
        if measured.ffn_s:
            nearest = min(measured.ffn_s, key=lambda ranks: (abs(ranks - roofline.num_weights), ranks))
            self._points = measured.ffn_s[nearest]
            self._ffn_roofline = PooledCost(roofline.facts, roofline.kind, num_kv=1, num_weights=nearest)
        self._undivided = PooledCost(
            roofline.facts, roofline.kind, num_kv=roofline.num_kv, num_weights=roofline.num_weights
        )
        one = PooledCost(roofline.facts, roofline.kind, num_kv=1, num_weights=1)
        base_s = one.times(decode_work(1, 0.0)).attention_s
        self._attention_excess_s = (measured.attention_base_s or base_s) - base_s
        self._slower = 1.0
        if lone_s:
            context, seconds = lone_s[0]
            self._slower = seconds / self._times(decode_work(1, float(context))).step_s
        self._prefill_slower: Points = tuple(
            (tokens, seconds / sum(self._by_stages(work).step_s for work in prompt_works(tokens)))
            for tokens, seconds in measured.prefill_s
        )

    def times(self, work: StepWork) -> StageTimes:
        times = self._by_stages(work)
        if work.num_tokens == work.num_sampled or not self._prefill_slower:
            return times
        return times.slower(_between(self._prefill_slower, work.num_tokens))

    def _by_stages(self, work: StepWork) -> StageTimes:
        """Before whole prompts that were measured correct it."""
        return self._times(work).slower(self._slower)

    def _times(self, work: StepWork) -> StageTimes:
        bound, measured = self._roofline.times(work), self._measured
        is_decode = work.num_tokens == work.num_sampled
        attention_s = max(1e-9, bound.attention_s + self._attention_excess_s)
        if measured.attention_base_s is not None and is_decode and self._roofline.num_kv == 1:
            attention_s = measured.attention_base_s + work.kv_tokens * measured.attention_token_s
            attention_s += (work.num_tokens - 1) * measured.attention_row_s
        crossing_s = bound.crossing_s
        if measured.crossing_s and is_decode:
            crossing_s = _between(measured.crossing_s, work.num_tokens)
        ffn_s, beside_s = bound.ffn_s, bound.beside_s
        if self._points:
            undivided_s = self._undivided.times(decode_work(work.num_tokens, 0.0)).ffn_s
            ffn_s, beside_s = self._roofline.ffn_parts(self._ffn_s(work.num_tokens, undivided_s), undivided_s)
        return StageTimes(
            num_layers=bound.num_layers,
            attention_s=attention_s,
            ffn_s=ffn_s,
            beside_s=beside_s,
            crossing_s=0.0 if self._is_whole else crossing_s,
            tail_s=bound.tail_s if measured.tail_s is None or not work.num_sampled else measured.tail_s,
        )

    def beside_others(self, work: StepWork) -> float:
        points = self._measured.shared_efficiency if self._roofline.beside_share else ()
        points = () if self._is_whole else points or self._measured.lanes_efficiency
        return 1.0 / _between(points, work.num_tokens) if points else 1.0

    def _ffn_s(self, num_tokens: int, bound_s: float) -> float:
        """Were none of it on the KV GPU. bound_s: that by the roofline."""
        measured_s = self._measured_ffn_s(num_tokens)
        if self._ffn_roofline.num_weights == self._roofline.num_weights:
            return measured_s
        return bound_s + max(0.0, measured_s - self._ffn_roofline.times(decode_work(num_tokens, 0.0)).ffn_s)

    def _measured_ffn_s(self, num_tokens: int) -> float:
        """On the measured number of GPUs."""
        nearest = min(max(num_tokens, self._points[0][0]), self._points[-1][0])
        seconds = _between(self._points, nearest)
        if nearest == num_tokens:
            return seconds
        bound = self._ffn_roofline
        return seconds * bound.times(decode_work(num_tokens, 0.0)).ffn_s / bound.times(decode_work(nearest, 0.0)).ffn_s


def _between(points: Points, rows: int) -> float:
    """Interpolated; beyond the points, the nearest one's."""
    after = bisect_right(points, rows, key=lambda point: point[0])
    if after == 0 or after == len(points):
        return points[0 if after == 0 else -1][1]
    (low, low_s), (high, high_s) = points[after - 1], points[after]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


def with_measurements(cost: PooledCost, table: MeasuredTable, model: str, *, is_one_gpu: bool = False) -> StepCost:
    """The cost corrected by the table's entry of the model, or of the catalogue entry it stands for, if any.

    is_one_gpu: both pools are on it.
    """
    measured = _entry_of(table, model)
    if measured is None:
        return cost
    return MeasuredCost(cost, measured, lone_s=measured.one_gpu_s if is_one_gpu else ())


def whole_with_measurements(cost: MonolithicCost, table: MeasuredTable, model: str) -> StepCost:
    """The same of a model that lies whole on one GPU; several all-reduce, which is not measured."""
    measured = _entry_of(table, model) if cost.num_gpus == 1 else None
    return cost if measured is None else MeasuredCost(cost.pooled, measured, is_whole=True, lone_s=measured.whole_s)


def sharing_of(table: MeasuredTable, model: str, num_layers: int) -> Sharing:
    """What prompts and decode cost each other: the model's own measurements, and the usual figures for what is not."""
    measured = _entry_of(table, model) or MeasuredModel()
    step_s = measured.beside_prompt_s
    return Sharing(
        longer_s=USUAL.longer_s if step_s is None else step_s / num_layers,
        prompt_slower=measured.prompt_slower or USUAL.prompt_slower,
    )


def _entry_of(table: MeasuredTable, model: str) -> MeasuredModel | None:
    found = lookup(model)
    return table.get(model) or (table.get(found.entry) if found is not None else None)


def sorted_points(points: Sequence[tuple[int, float]]) -> Points:
    return tuple(sorted(points))
