"""Which group of GPUs serves which model: a mixed-integer program over bytes, KV demand and stage times.

Unlike stage times make lanes wait for each other, so models whose attention and FFN segments take alike are put
together. Per group, with x[m, g] = 1 where model m is in group g:

  FFN bytes          sum f[m] x[m,g]                                          <= weights ranks x room
  KV and its weights sum (k w[m] + mean[m] + z var[m] / (2 s)) x[m,g] + z s/2  <= k x room
  stage times        low[g] <= a[m] <= high[g] for its models, for attention and FFN each
  minimise           sum over groups of (high - low), and the largest group's share of the traffic
                                                                (of FFN bytes, where there is no traffic)

The KV line bounds mean + z * sqrt(sum of variances) from above for any s > 0 (arithmetic and geometric mean); s is the
deviation of an average group. Groups are alike, so model i may only go to the first i + 1 groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt

import numpy as np

from crosspool.errors import CapacityError
from crosspool.planner.placement_search import Item, objective, search
from crosspool.planner.plan import Placement
from crosspool.units import format_bytes

NORMAL_P99 = 2.33
"""Standard deviations above the mean of the 99th percentile of a normal distribution."""

BALANCE_WEIGHT = 1.0
MAX_BINARIES = 1000
"""Model-group pairs up to which the program is solved in whole numbers."""

NODE_LIMIT = 500
RELATIVE_GAP = 1e-2
"""Where the solver may stop; the gap it has proven by then is printed with the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One model for the program. ffn_bytes: of its largest slice times the weights ranks, since ranks fill unevenly.

    attention_s, ffn_s: mean seconds of a layer. busy: its part of a group's time.
    """

    name: str
    ffn_bytes: int
    kv_pool_weight_bytes: int
    mean_bytes: float
    variance_bytes: float
    attention_s: float
    ffn_s: float
    busy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRoom:
    """What one group offers. fixed bytes (runtime, buffers, reserve) are already taken off."""

    num_kv: int
    kv_bytes_per_rank: int
    num_weights: int
    weights_bytes_per_rank: int


def place_models(
    candidates: Sequence[Candidate],
    room: GroupRoom,
    num_groups: int,
    *,
    deviations: float = NORMAL_P99,
    time_limit_s: float = 300,
) -> tuple[list[list[str]], Placement]:
    """Names of the models of each group. Raises CapacityError where no grouping fits, with the totals.

    deviations: how many standard deviations of KV demand above its mean a group must hold (2.33: P99 of a normal).
    """
    if num_groups == 1:
        return [[item.name for item in candidates]], Placement(objective=0.0, gap=0.0, method="one group")
    _check_totals(candidates, room, num_groups)
    order = sorted(candidates, key=lambda item: (-item.ffn_bytes, item.name))
    items = _items(order, room, num_groups, deviations)
    is_exact = len(order) * num_groups <= MAX_BINARIES
    solved, bound = _solve(_program(items, num_groups), num_groups, len(order), time_limit_s, integral=is_exact)
    starts = [solved, None] if solved is not None else [None]
    found = [group_of for start in starts if (group_of := search(items, num_groups, BALANCE_WEIGHT, start)) is not None]
    if not found:
        raise CapacityError(
            f"{len(order)} models do not fit {num_groups} groups of {room.num_kv} KV and {room.num_weights} weights "
            f"GPUs ({format_bytes(room.num_weights * room.weights_bytes_per_rank)} for FFNs, "
            f"{format_bytes(room.num_kv * room.kv_bytes_per_rank)} for attention weights and KV in each); add GPUs, or "
            "serve fewer models"
        )
    value, best = min((objective(items, group_of, num_groups, BALANCE_WEIGHT), group_of) for group_of in found)
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for item, group in zip(order, best, strict=True):
        groups[group].append(item.name)
    method = (
        "a mixed-integer program (HiGHS) and local search" if is_exact else "local search, bounded by a linear program"
    )
    gap = max(0.0, 1.0 - bound / value) if value > 0 else 0.0
    return [sorted(names) for names in groups], Placement(objective=value, gap=gap, method=method)


def _check_totals(candidates: Sequence[Candidate], room: GroupRoom, num_groups: int) -> None:
    each = room.num_weights * room.weights_bytes_per_rank
    largest = max(candidates, key=lambda item: item.ffn_bytes)
    if largest.ffn_bytes > each:
        raise CapacityError(
            f"{largest.name} needs {format_bytes(largest.ffn_bytes)} of FFN; a group of {room.num_weights} weights "
            f"GPUs offers {format_bytes(each)}; use larger groups, or more weights GPUs in each"
        )
    total = sum(item.ffn_bytes for item in candidates)
    if total > num_groups * each:
        raise CapacityError(
            f"{len(candidates)} models need {format_bytes(total)} of FFN; {num_groups} groups offer "
            f"{format_bytes(num_groups * each)}; add GPUs, or serve fewer models"
        )


@dataclass(slots=True)
class _Program:
    """Minimise cost . v where rows . v <= high, sparse: v is x (model-major), 4 bounds a group, the largest share.

    The first `num_equal` rows are equalities.
    """

    cost: list[float]
    upper: list[float]
    num_equal: int
    high: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, entries: Mapping[int, float], high: float) -> None:
        self.row += [len(self.high)] * len(entries)
        self.column += entries.keys()
        self.value += entries.values()
        self.high.append(high)


def _items(order: Sequence[Candidate], room: GroupRoom, num_groups: int, deviations: float) -> list[Item]:
    """The models in parts of a group's room, by the lines of the module's docstring."""
    spread = max(1.0, sqrt(sum(item.variance_bytes for item in order) / num_groups))
    kv_room = room.num_kv * room.kv_bytes_per_rank - deviations * spread / 2
    if kv_room <= 0:
        raise CapacityError(
            f"KV demand varies by {format_bytes(spread)} in an average group, which has "
            f"{format_bytes(room.num_kv * room.kv_bytes_per_rank)} for KV and its weights; add KV GPUs"
        )
    ffn_room = room.num_weights * room.weights_bytes_per_rank
    traffic = [item.busy for item in order] if any(item.busy for item in order) else [item.ffn_bytes for item in order]
    attention, ffn = _unit([item.attention_s for item in order]), _unit([item.ffn_s for item in order])
    return [
        Item(
            ffn=item.ffn_bytes / ffn_room,
            kv=(
                room.num_kv * item.kv_pool_weight_bytes
                + item.mean_bytes
                + deviations * item.variance_bytes / (2 * spread)
            )
            / kv_room,
            times=(attention[idx], ffn[idx]),
            share=num_groups * traffic[idx] / sum(traffic),
        )
        for idx, item in enumerate(order)
    ]


def _program(items: Sequence[Item], num_groups: int) -> _Program:
    num, num_x = len(items), len(items) * num_groups
    share_column = num_x + 4 * num_groups
    upper = [1.0] * share_column + [inf]
    for idx in range(min(num, num_groups)):  # groups are alike: model i goes to one of the first i + 1
        upper[idx * num_groups + idx + 1 : (idx + 1) * num_groups] = [0.0] * (num_groups - idx - 1)
    program = _Program([0.0] * num_x + [1.0, -1.0] * (2 * num_groups) + [BALANCE_WEIGHT], upper, num)
    for idx in range(num):
        program.add({idx * num_groups + group: 1.0 for group in range(num_groups)}, 1.0)
    for group in range(num_groups):
        x = [idx * num_groups + group for idx in range(num)]
        program.add({x[idx]: item.ffn for idx, item in enumerate(items)}, 1.0)
        program.add({x[idx]: item.kv for idx, item in enumerate(items)}, 1.0)
        program.add({x[idx]: item.share for idx, item in enumerate(items)} | {share_column: -1.0}, 0.0)
        for stage in (0, 1):
            top, bottom = num_x + 4 * group + 2 * stage, num_x + 4 * group + 2 * stage + 1
            for idx, item in enumerate(items):
                program.add({x[idx]: item.times[stage], top: -1.0}, 0.0)  # top >= time where x is 1
                program.add({x[idx]: 1.0 - item.times[stage], bottom: 1.0}, 1.0)  # bottom <= time where x is 1
            program.add({bottom: 1.0, top: -1.0}, 0.0)
    return program


def _solve(
    program: _Program, num_groups: int, num: int, time_limit_s: float, *, integral: bool
) -> tuple[list[int] | None, float]:
    """The group of each model, None where none was found, and a lower bound; not `integral`: the bound alone."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise ValueError("grouping models over several groups needs SciPy; pip install 'crosspool[plan]'") from None
    high = np.array(program.high)
    low = np.full(len(high), -np.inf)
    low[: program.num_equal] = high[: program.num_equal]
    kinds = np.zeros(len(program.cost))
    kinds[: num * num_groups] = 1 if integral else 0
    shape = (len(high), len(program.cost))
    result = milp(
        np.array(program.cost),
        integrality=kinds,
        bounds=Bounds(0.0, np.array(program.upper)),
        constraints=LinearConstraint(csr_array((program.value, (program.row, program.column)), shape), low, high),
        options={"node_limit": NODE_LIMIT, "time_limit": time_limit_s, "mip_rel_gap": RELATIVE_GAP},
    )
    if result.x is None:
        return None, 0.0
    if not integral:
        return None, float(result.fun)
    assigned = np.asarray(result.x[: num * num_groups]).reshape(num, num_groups)
    return [int(group) for group in assigned.argmax(axis=1)], float(result.mip_dual_bound)


def _unit(values: Sequence[float]) -> list[float]:
    """Logarithms of `values`, moved and scaled to [0, 1]."""
    logs = [log(value) for value in values]
    low, span = min(logs), max(logs) - min(logs)
    return [(value - low) / span if span else 0.0 for value in logs]
