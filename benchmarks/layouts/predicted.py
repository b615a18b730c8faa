"""What planner and simulator say of a load that was measured: the same requests, the same GPUs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import RESULTS
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.weights_rank.patience import PIECE_S, TOKEN_S
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
STAGE_TIMES = (
    *("moe_layer_h200", "attention_half_h200", "decode_step_h200-x2", "decode_ways_h200-x2"),
    *("moe_rows_h200", "decode_shares_h200-x2"),
    *("lanes_h200", "lanes_h200-x2", "prefill_h200-x2"),
)
"""Kept results with measured stage times; row by row the later one counts."""


def stage_times(folder: Path = RESULTS) -> MeasuredTable:
    """The newest of each; an empty table where there is none.

    What two lanes cost each other has not been measured of every model: those that were stand for the others.
    """
    newest = [max(found) for name in STAGE_TIMES if (found := sorted(folder.glob(f"{name}_2*.json")))]
    table = read_measured(newest) if newest else {}
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


def planned(result: Mapping[str, Any], gpus: Mapping[str, Any], service: Mapping[str, Any], quantile: float) -> Planned:
    """The plan for the requests that a run has sent."""
    return _planned(result, gpus, service, quantile)[0]


def kv_demand(result: Mapping[str, Any], gpus: Mapping[str, Any], quantile: float = QUANTILE) -> QuantileEstimate:
    """The plan's quantile of active KV bytes over the time of the run, at the speeds that the run has seen."""
    every = result["models"]["all"]
    prompt = result["total_input_tokens"] / result["completed"]
    service = {
        "cost": "steady",
        "tbt_ms": every["tbt_ms"]["mean"],
        "prefill_tokens_per_s": 1e3 * prompt / every["ttft_ms"]["mean"],
    }
    (group,) = planned(result, gpus, service, quantile).groups
    assert group.demand is not None
    return group.demand.paged


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
) -> GroupResult:
    """The run's requests in the simulator, stage times as measured.

    models: as served, in turn over a baseline's GPUs; none: as the planner would place them. beside_share: of every
    FFN, on the KV GPU.
    """
    planned_run = _planned(result, gpus, {}, QUANTILE)
    return _simulated(*planned_run, layout, max(result["start_times"]) + 1.0, measured, models, beside_share)


def outlook(
    trace: Path, gpus: Mapping[str, Any], layout: Layout, measured: MeasuredTable, models: Sequence[str] = ()
) -> GroupResult:
    """What the simulator says of a whole trace that was not measured."""
    recorded = read_trace(trace)
    duration_s = float(recorded.arrival_s[-1]) + 1.0
    plan_input = _plan_input(recorded.models, trace, duration_s, gpus, {}, QUANTILE)
    return _simulated(plan_deployment(plan_input), plan_input, layout, duration_s, measured, models)


def _simulated(
    plan: Planned,
    plan_input: PlanInput,
    layout: Layout,
    duration_s: float,
    measured: MeasuredTable,
    models: Sequence[str],
    beside_share: float = 0.0,
) -> GroupResult:
    """Two pools on two GPUs as the server runs them: steps handed out ahead, prompts behind decode for a while.

    What is on one GPU at once shares it: its streams have no order.
    """
    if layout == "crosspool" and plan_input.gpus.count > 1:
        settings = SimulationSettings(
            layout=layout,
            duration_s=duration_s,
            mode="exact",
            is_ahead=True,
            prompts_wait=PASS_TOKENS,
            prompts_share=True,
            patience_s=PIECE_S,
            patience_token_s=TOKEN_S,
            beside_share=beside_share,
        )
    else:
        count = plan_input.gpus.count
        hosting = tuple(tuple(models[gpu::count]) for gpu in range(count)) if models else None
        settings = SimulationSettings(layout=layout, duration_s=duration_s, order=STREAMS, hosting=hosting)
    (group,) = simulate(plan, plan_input, settings, measured=measured)
    return group


def _planned(
    result: Mapping[str, Any], gpus: Mapping[str, Any], service: Mapping[str, Any], quantile: float
) -> tuple[Planned, PlanInput]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "sent.jsonl"
        trace.write_text("\n".join(_rows(result)), encoding="utf-8")
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


def _rows(result: Mapping[str, Any]) -> Sequence[str]:
    columns = (result["start_times"], result["request_models"], result["input_lens"], result["output_lens"])
    rows = sorted(zip(*columns, strict=True))
    first = rows[0][0]
    return [
        json.dumps({"t": begun - first, "model": model, "in": prompt, "out": max(1, output)})
        for begun, model, prompt, output in rows
    ]
