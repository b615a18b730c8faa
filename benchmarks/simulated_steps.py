"""Lone decode steps of the paper's models on 1 + 1 H200: by the roofline, from kept stage times, and as measured whole.

    python -m benchmarks.simulated_steps

Prints the table of docs/concepts/simulator.md, which names the results that it reads. Milliseconds a step by batch;
every row of a batch has the same context. Measured steps are those with a layer as one kernel; "-" where none was kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.full_models import CONFIGS
from benchmarks.report import RESULTS
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import gpu_kind
from crosspool.simulator.cost import PooledCost, StepCost, decode_work
from crosspool.simulator.measured import MeasuredTable, with_measurements
from crosspool.simulator.measured_files import read_measured

STAGES = ("moe_layer_h200", "attention_half_h200", "decode_step_h200-x2")
STEPS = "decode_step_h200-x2"
BATCHES = (1, 2, 4, 8)
CONTEXT = 4096


def step_ms(cost: StepCost, batches: Sequence[int], context: int) -> list[float]:
    """Of `batches` rows with `context` tokens each."""
    return [1e3 * cost.times(decode_work(batch, batch * context)).step_s for batch in batches]


def table(measured: MeasuredTable, steps: Mapping[str, float]) -> str:
    """Markdown. steps: the metrics of whole steps."""
    rows = [
        f"| ms a step, batch {_listed(map(str, BATCHES))} | roofline | from measured stages | measured |",
        "| --- | --- | --- | --- |",
    ]
    for model in CONFIGS:
        roofline = PooledCost(catalogue_facts(model), gpu_kind("h200"), num_kv=1, num_weights=1)
        costs = (roofline, with_measurements(roofline, measured, model))
        simulated = [_listed(f"{ms:.2f}" for ms in step_ms(cost, BATCHES, CONTEXT)) for cost in costs]
        names = [f"decode_ms.{model}.1+1.b{batch}.{CONTEXT // 1024}k.fused.p50" for batch in BATCHES]
        whole = _listed(f"{steps[name]:.2f}" if name in steps else "-" for name in names)
        rows.append(f"| {model} | {simulated[0]} | {simulated[1]} | {whole} |")
    return "\n".join(rows)


def _listed(parts: Iterable[str]) -> str:
    return " / ".join(parts)


def newest(name: str) -> Path:
    """The newest kept result `<what>_<hardware>`. Raises ValueError where there is none."""
    found = sorted(RESULTS.glob(f"{name}_????-??-??.json"))
    if not found:
        raise ValueError(f"no kept result {name}; it is made by a script of benchmarks/")
    return found[-1]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = read_measured([newest(name) for name in STAGES])
    print(table(measured, json.loads(newest(STEPS).read_text(encoding="utf-8"))["metrics"]))


if __name__ == "__main__":
    main()
