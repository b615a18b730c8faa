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

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

import numpy as np

from crosspool.errors import CapacityError
from crosspool.planner.plan import Placement
from crosspool.units import format_bytes

NORMAL_P99 = 2.33
"""Standard deviations above the mean of the 99th percentile of a normal distribution."""

BALANCE_WEIGHT = 1.0
NODE_LIMIT = 2000
RELATIVE_GAP = 1e-2
"""Where the solver may stop; the gap it has proven by then is printed with the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One model for the program. attention_s, ffn_s: mean seconds of a layer; busy: its part of a group's time."""

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
    solution = _solve(_program(order, room, num_groups, deviations), num_groups, len(order), time_limit_s)
    if solution is None:
        raise CapacityError(
            f"{len(order)} models do not fit {num_groups} groups of {room.num_kv} KV and {room.num_weights} weights "
            f"GPUs ({format_bytes(room.num_weights * room.weights_bytes_per_rank)} for FFNs, "
            f"{format_bytes(room.num_kv * room.kv_bytes_per_rank)} for attention weights and KV in each); add GPUs, or "
            "serve fewer models"
        )
    chosen, placement = solution
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for item, group in zip(order, chosen, strict=True):
        groups[group].append(item.name)
    return [sorted(names) for names in groups], placement


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


@dataclass(frozen=True, slots=True)
class _Program:
    """Minimise cost . v where matrix v <= high. v: x (model-major), 4 bounds a group, the largest share of traffic."""

    cost: np.ndarray[Any, np.dtype[np.float64]]
    matrix: np.ndarray[Any, np.dtype[np.float64]]
    high: np.ndarray[Any, np.dtype[np.float64]]
    equal_rows: int
    upper: np.ndarray[Any, np.dtype[np.float64]]


def _program(order: Sequence[Candidate], room: GroupRoom, num_groups: int, deviations: float) -> _Program:
    num, per_group = len(order), 4
    num_x = num * num_groups
    width = num_x + per_group * num_groups + 1
    attention, ffn = _unit([item.attention_s for item in order]), _unit([item.ffn_s for item in order])
    spread = max(1.0, sqrt(sum(item.variance_bytes for item in order) / num_groups))
    kv_cost = [
        room.num_kv * item.kv_pool_weight_bytes + item.mean_bytes + deviations * item.variance_bytes / (2 * spread)
        for item in order
    ]
    kv_room = room.num_kv * room.kv_bytes_per_rank - deviations * spread / 2
    shares = [item.busy for item in order] if any(item.busy for item in order) else [item.ffn_bytes for item in order]
    rows: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    high: list[float] = []

    def add(entries: dict[int, float], bound: float) -> None:
        row = np.zeros(width)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        high.append(bound)

    for idx in range(num):  # each model in one group; these rows are equalities
        add({idx * num_groups + group: 1.0 for group in range(num_groups)}, 1.0)
    for group in range(num_groups):
        x = [idx * num_groups + group for idx in range(num)]
        bounds = num_x + per_group * group
        ffn_room = room.num_weights * room.weights_bytes_per_rank
        add({x[idx]: item.ffn_bytes / ffn_room for idx, item in enumerate(order)}, 1.0)
        scale = max(1.0, abs(kv_room))
        add({x[idx]: kv_cost[idx] / scale for idx in range(num)}, kv_room / scale)
        share = {x[idx]: num_groups * part / sum(shares) for idx, part in enumerate(shares)}
        add({**share, width - 1: -1.0}, 0.0)
        for stage, times in enumerate((attention, ffn)):
            top, bottom = bounds + 2 * stage, bounds + 2 * stage + 1
            for idx in range(num):
                add({x[idx]: times[idx], top: -1.0}, 0.0)  # top >= time where x is 1
                add({x[idx]: 1.0 - times[idx], bottom: 1.0}, 1.0)  # bottom <= time where x is 1
            add({bottom: 1.0, top: -1.0}, 0.0)
    cost = np.zeros(width)
    cost[num_x:-1] = np.tile([1.0, -1.0], 2 * num_groups)
    cost[-1] = BALANCE_WEIGHT
    upper = np.ones(width)
    upper[-1] = np.inf
    for idx in range(min(num, num_groups)):
        upper[idx * num_groups + idx + 1 : (idx + 1) * num_groups] = 0.0
    return _Program(cost, np.stack(rows), np.array(high), num, upper)


def _solve(program: _Program, num_groups: int, num: int, time_limit_s: float) -> tuple[list[int], Placement] | None:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ValueError("grouping models over several groups needs SciPy; pip install 'crosspool[plan]'") from None
    low = np.full(len(program.high), -np.inf)
    low[: program.equal_rows] = program.high[: program.equal_rows]
    integral = np.zeros(len(program.cost))
    integral[: num * num_groups] = 1
    result = milp(
        program.cost,
        integrality=integral,
        bounds=Bounds(0.0, program.upper),
        constraints=LinearConstraint(program.matrix, low, program.high),
        options={"node_limit": NODE_LIMIT, "time_limit": time_limit_s, "mip_rel_gap": RELATIVE_GAP},
    )
    if result.x is None:
        return None
    assigned = np.asarray(result.x[: num * num_groups]).reshape(num, num_groups)
    gap = float(result.mip_gap) if result.mip_gap is not None else 0.0
    return [int(group) for group in assigned.argmax(axis=1)], Placement(
        objective=float(result.fun), gap=gap, method="mixed-integer program (HiGHS)"
    )


def _unit(values: Sequence[float]) -> list[float]:
    """Logarithms of `values`, moved and scaled to [0, 1]."""
    logs = [log(value) for value in values]
    low, span = min(logs), max(logs) - min(logs)
    return [(value - low) / span if span else 0.0 for value in logs]
