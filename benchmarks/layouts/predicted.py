"""What planner and simulator say of a load that was measured: the same requests, the same GPUs."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import RESULTS
from crosspool.backends.cuda.steps.passes import BUCKETS, PASS_TOKENS
from crosspool.backends.cuda.weights_rank.patience import PIECE_S, TOKEN_S
from crosspool.config import DECODE_LANES
from crosspool.planner.deployment import PlanInput
from crosspool.planner.planner import Planned, plan_deployment
from crosspool.planner.quantile import QuantileEstimate
from crosspool.simulator.group import STREAMS, Layout
from crosspool.simulator.measured import MeasuredTable
from crosspool.simulator.measured_files import read_measured
from crosspool.simulator.result import GroupResult
from crosspool.simulator.simulator import SimulationSettings, simulate
from crosspool.workload.traces import read_trace

QUANTILE = 0.99
SOME_SPEED = {"cost": "steady", "tbt_ms": 20.0}
"""Of a plan whose ranks and memory alone are used, since its requests are simulated: any would do, and none that the
planner finds, which is refused where a load is more than GPUs serve without a queue."""

TIMES, SHIFT_S = 5, 0.005
"""Simulations of one run, and the most by which arrivals differ between them."""
STAGE_TIMES = (
    *("moe_layer_h200", "attention_half_h200", "decode_step_h200-x2", "decode_ways_h200-x2"),
    *("moe_rows_h200", "decode_shares_h200-x2"),
    *("lanes_h200", "lanes_h200-x2", "prefill_h200-x2", "layouts_h200", "layouts_h200-x2"),
)
"""Kept results with measured stage times of the kernels that the kept runs of layouts had; row by row the later one
counts."""
PRESENT_FFN = "moe_layer_fused_h200"
"""Layers of experts as they are now."""


def stage_times(folder: Path = RESULTS, *, is_present: bool = False) -> MeasuredTable:
    """The newest of each; an empty table where there is none. is_present: with the FFNs of today's kernels.

    What two lanes cost each other has not been measured of every model: those that were stand for the others.
    """
    table = _newest(folder, STAGE_TIMES)
    if is_present:
        ffns = {name: model.ffn_s for name, model in _newest(folder, (PRESENT_FFN,)).items()}
        table = {name: replace(model, ffn_s=ffns.get(name, model.ffn_s)) for name, model in table.items()}
    lanes = max((model.lanes_efficiency for model in table.values()), key=len, default=())
    shared = max((model.shared_efficiency for model in table.values()), default=())
    return {
        name: replace(
            model,
            lanes_efficiency=model.lanes_efficiency or lanes,
            shared_efficiency=model.shared_efficiency or shared,
        )
        for name, model in table.items()
    }


def _newest(folder: Path, names: Sequence[str]) -> MeasuredTable:
    newest = [max(found) for name in names if (found := sorted(folder.glob(f"{name}_2*.json")))]
    return read_measured(newest) if newest else {}


def kv_demand(result: Mapping[str, Any], gpus: Mapping[str, Any], quantile: float = QUANTILE) -> QuantileEstimate:
    """The plan's quantile of active KV bytes over the time of the run, with each request's stay as the run saw it.

    One speed for all requests would not do: steps are slowest when most requests are there, so these stay longest just
    then, and the peak is higher than at the mean speed.
    """
    (group,) = _planned(result, gpus, {}, quantile, has_stays=True)[0].groups
    assert group.demand is not None
    return group.demand.paged


def kv_simulated(groups: Sequence[GroupResult], quantile: float = QUANTILE) -> float:
    """The same of simulated pools, whose requests stay as stage times have it: the median of the simulations."""
    held = [
        sum(average.quantile(quantile) for average in group.occupancy.values()) * group.frame_bytes for group in groups
    ]
    return median(held)


def kv_held(result: Mapping[str, Any], quantile: float = QUANTILE) -> float:
    """The same quantile of the bytes in block tables, as the server told them at even times."""
    return float(np.quantile([sum(sample["used_bytes"].values()) for sample in result["kv_samples"]], quantile))


def simulated(
    result: Mapping[str, Any],
    gpus: Mapping[str, Any],
    layout: Layout,
    measured: MeasuredTable,
    models: Sequence[str] = (),
    beside_share: float = 0.0,
    decode_lanes: int = DECODE_LANES,
) -> list[GroupResult]:
    """The run's requests in the simulator, stage times as measured: `TIMES` simulations.

    All but the first have every arrival up to SHIFT_S earlier or later: which model's steps meet which then differs,
    and with it P50 and P99, by some percent. models: as served, in turn over a baseline's GPUs; none: as the planner
    would place them. beside_share: of every FFN, on the KV GPU. decode_lanes: of two pools.
    """
    found = []
    for number in range(TIMES):
        rng = random.Random(number)
        shifts_s = [rng.uniform(-SHIFT_S, SHIFT_S) if number else 0.0 for _ in result["start_times"]]
        planned, plan_input = _planned(result, gpus, SOME_SPEED, QUANTILE, shifts_s=shifts_s)
        plan_input = _with_engine(plan_input, {"decode_lanes": decode_lanes})
        last_s, rows = max(result["start_times"]) + 1.0, rows_of_passes(result)
        found.append(_simulated(planned, plan_input, layout, last_s, measured, models, beside_share, rows))
    return found


def has_present_kernels(result: Mapping[str, Any]) -> bool:
    """Whether the run had today's FFNs; kept ones that had others are marked by hand."""
    told: Mapping[str, str] = result.get("machine", {})
    return told.get("kernels") != "before"


def rows_of_passes(result: Mapping[str, Any]) -> Sequence[int]:
    """Numbers of rows that decode's passes had in the run; the present ones where it does not say."""
    found: Sequence[int] = result.get("machine", {}).get("pass_rows", BUCKETS)
    return found


def outlook(
    trace: Path,
    gpus: Mapping[str, Any],
    layout: Layout,
    measured: MeasuredTable,
    models: Sequence[str] = (),
    *,
    beside_share: float = 0.0,
    engine: Mapping[str, int] | None = None,
    order: str = "priority",
    patience: float = 1.0,
) -> GroupResult:
    """What the simulator says of a whole trace that was not measured.

    engine: settings that are not as planned. order: of two pools' segments. patience: of prompts, over the present one.
    """
    recorded = read_trace(trace)
    duration_s = float(recorded.arrival_s[-1]) + 1.0
    plan_input = _plan_input(recorded.models, trace, duration_s, gpus, SOME_SPEED, QUANTILE)
    plan_input = _with_engine(plan_input, engine or {})
    planned = plan_deployment(plan_input)
    return _simulated(
        planned, plan_input, layout, duration_s, measured, models, beside_share, order=order, patience=patience
    )


def _with_engine(plan_input: PlanInput, changes: Mapping[str, int]) -> PlanInput:
    """With settings of the engine that are not as planned."""
    return plan_input.model_copy(update={"engine": plan_input.engine.model_copy(update=changes)})


def _simulated(
    plan: Planned,
    plan_input: PlanInput,
    layout: Layout,
    duration_s: float,
    measured: MeasuredTable,
    models: Sequence[str],
    beside_share: float = 0.0,
    pass_rows: Sequence[int] = BUCKETS,
    order: str = "priority",
    patience: float = 1.0,
) -> GroupResult:
    """Two pools on two GPUs as the server runs them: steps handed out ahead, prompts behind decode for a while.

    What is on one GPU at once shares it: its streams have no order. Where nothing is measured passes have the rows of
    their steps: then it is by bytes alone.
    """
    rows = tuple(pass_rows) if measured else ()
    if layout == "crosspool" and plan_input.gpus.count > 1:
        settings = SimulationSettings(
            layout=layout,
            duration_s=duration_s,
            mode="exact",
            order=order,
            is_ahead=True,
            prompts_wait=PASS_TOKENS,
            prompts_share=True,
            patience_s=patience * PIECE_S,
            patience_token_s=patience * TOKEN_S,
            beside_share=beside_share,
            pass_rows=rows,
        )
    elif layout == "crosspool":
        settings = SimulationSettings(
            layout=layout,
            duration_s=duration_s,
            order=STREAMS,
            patience_s=PIECE_S,
            patience_token_s=TOKEN_S,
            pass_rows=rows,
        )
    else:
        count = plan_input.gpus.count
        hosting = tuple(tuple(models[gpu::count]) for gpu in range(count)) if models else None
        settings = SimulationSettings(
            layout=layout,
            duration_s=duration_s,
            patience_s=PIECE_S,
            patience_token_s=TOKEN_S,
            hosting=hosting,
            pass_rows=rows,
        )
    (group,) = simulate(plan, plan_input, settings, measured=measured)
    return group


def _planned(
    result: Mapping[str, Any],
    gpus: Mapping[str, Any],
    service: Mapping[str, Any],
    quantile: float,
    *,
    has_stays: bool = False,
    shifts_s: Sequence[float] = (),
) -> tuple[Planned, PlanInput]:
    """The plan for the requests that a run has sent. has_stays: with how long each was there. shifts_s: of arrivals."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "sent.jsonl"
        trace.write_text("\n".join(_rows(result, has_stays, shifts_s)), encoding="utf-8")
        models = list(dict.fromkeys(result["request_models"]))
        plan_input = _plan_input(models, trace, result["duration"], gpus, service, quantile)
        return plan_deployment(plan_input), plan_input


def _plan_input(
    models: Sequence[str],
    trace: Path,
    period_s: float,
    gpus: Mapping[str, Any],
    service: Mapping[str, Any],
    quantile: float,
) -> PlanInput:
    return PlanInput.model_validate(
        {
            "gpus": {"kind": "h200", **gpus},
            "precision": 0.05,
            "quantile": quantile,
            "models": [{"model": name} for name in models],
            "trace": {"file": str(trace), "period": period_s},
            "service": dict(service),
        }
    )


def _rows(result: Mapping[str, Any], has_stays: bool, shifts_s: Sequence[float]) -> Sequence[str]:
    stays = [first + sum(gaps) for first, gaps in zip(result["ttfts"], result["itls"], strict=True)]
    begun = [begin + shift for begin, shift in zip(result["start_times"], shifts_s or repeat(0.0), strict=False)]
    rows = sorted(zip(begun, result["request_models"], result["input_lens"], result["output_lens"], stays, strict=True))
    first = rows[0][0]
    return [
        json.dumps(
            {"t": begin - first, "model": model, "in": prompt, "out": max(1, output)}
            | ({"service_s": stay} if has_stays else {})
        )
        for begin, model, prompt, output, stay in rows
        if stay > 0 or not has_stays  # what was refused held nothing
    ]
