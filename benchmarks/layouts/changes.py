"""Which change of two pools would gain how much on a load: simulated from measured stage times, one change at a time.

    python -m benchmarks.layouts.changes --trace-dir TRACES [--rates 0.8 2.0] [--seconds 20]
    python -m benchmarks.layouts.changes --trace-dir TRACES --gpus 4 --seconds 100 --times 1

For the layouts on two GPUs, crosspool-1+1 and crosspool-1+1s (a quarter of every FFN beside attention), or for those of
four GPUs and fewer that were never measured: P50 and P99 of the times between tokens, output tokens/s and TTFT, medians
of simulations whose arrivals differ by up to 5 ms. Beside them, without any change, whole models on the same GPUs. No
figure here is a measurement.

simulated_tbt_ms.<layout>.<change>.<model>.<rate>.<p50|p99>, simulated_tokens_per_s.<layout>.<change>.<rate>,
simulated_ttft_ms.<layout>.<change>.all.<rate>.<p50|p99>.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

from benchmarks.layouts.predicted import SHIFT_S, TIMES, outlook, stage_times
from benchmarks.layouts.server import GPU_LAYOUTS, beside_share, num_gpus
from benchmarks.layouts.targets import TBT_MS
from benchmarks.report import RESULTS, Report
from crosspool.planner.catalogue import catalogue_facts
from crosspool.simulator.group import Layout
from crosspool.simulator.measured import MeasuredModel, MeasuredTable, sharing_of
from crosspool.simulator.result import GroupResult

MODELS = ("glm-4.7-flash", "qwen3-30b-a3b", "deepseek-v2-lite")
LAYOUTS = ("crosspool-1+1", "crosspool-1+1s")
BASELINES = ("static-2", "elastic-2")
THREE_WEIGHTS = "crosspool-1+3"
UNMEASURED = (THREE_WEIGHTS, "crosspool-1+2", "crosspool-2+2", "crosspool-3+1", "static-4", "elastic-4")
BY_GPUS = {2: (*LAYOUTS, *BASELINES), 4: UNMEASURED}
"""The most GPUs of a layout -> what is simulated."""
NUM_SIMULATIONS = {"0.8": TIMES, "2.0": 1}
"""By rate; where requests wait for each other most, a few milliseconds of their arrivals change little."""
RATES = tuple(NUM_SIMULATIONS)
ROUTER_US = 5.0
"""What a layer's router takes of the weights GPU at eight rows; routed on the KV rank it takes as much there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """words: what is changed. stages: of each model's stage times. engine: settings that are not as planned.

    order: of segments at a station. patience: of prompts, over the present one. is_present: with today's FFNs. at: the
    rates that it is simulated at; of: the layouts.
    """

    words: str
    stages: Callable[[MeasuredModel], MeasuredModel] = lambda model: model
    engine: Mapping[str, int] = field(default_factory=dict)
    order: str = "priority"
    patience: float = 1.0
    is_present: bool = True
    at: Sequence[str] = ("0.8",)
    of: Sequence[str] = (*LAYOUTS, THREE_WEIGHTS)


def ffn_times(
    model: MeasuredModel, factor: float = 1.0, less_us: float = 0.0, rows: range = range(10**6)
) -> MeasuredModel:
    """Layers' FFNs take `factor` of their time at these numbers of rows, and everywhere `less_us` less."""
    ffn_s = {
        ranks: tuple((at, (value * factor if at in rows else value) - 1e-6 * less_us) for at, value in points)
        for ranks, points in model.ffn_s.items()
    }
    return replace(model, ffn_s=ffn_s)


def routed_on_kv(model: MeasuredModel) -> MeasuredModel:
    base_s = model.attention_base_s
    later = None if base_s is None else base_s + 1e-6 * ROUTER_US
    return replace(ffn_times(model, less_us=ROUTER_US), attention_base_s=later)


def cut_in_two(model: MeasuredModel) -> MeasuredModel:
    """Every layer's FFN runs twice, each time for half of the rows."""
    ffn_s = {}
    for ranks, points in model.ffn_s.items():
        rows, seconds = [at for at, _ in points], [value for _, value in points]
        halves = [float(np.interp((at + 1) // 2, rows, seconds)) for at in rows]
        ffn_s[ranks] = tuple((at, 2.0 * half) for at, half in zip(rows, halves, strict=True))
    return replace(model, ffn_s=ffn_s)


CHANGES: Mapping[str, Change] = {
    "none": Change(words="as measured stage times have it", at=RATES, of=(*LAYOUTS, *BASELINES, *UNMEASURED)),
    "before": Change(words="with the FFNs that the kept runs had", is_present=False, at=RATES, of=LAYOUTS),
    "ffn95": Change(words="FFN at 8 to 24 rows x 0.95", stages=lambda model: ffn_times(model, 0.95, rows=range(8, 25))),
    "routekv": Change(words="the KV rank routes (--route kv)", stages=routed_on_kv),
    "both": Change(
        words="FFN x 0.95 and --route kv",
        stages=lambda model: routed_on_kv(ffn_times(model, 0.95, rows=range(8, 25))),
        of=LAYOUTS,
    ),
    "prompts_free": Change(
        words="prompts cost decode nothing (ranks of their own)",
        stages=lambda model: replace(model, beside_prompt_s=0.0),
    ),
    "3lanes": Change(
        words="three decode lanes (--decode-lanes 3)",
        engine={"decode_lanes": 3},
        at=RATES,
        of=(*LAYOUTS, THREE_WEIGHTS, "crosspool-1+2"),
    ),
    "halves": Change(words="each model's batch cut in two, in lanes of their own", stages=cut_in_two, of=LAYOUTS),
    "64seqs": Change(
        words="up to 64 sequences of a model at once (--max-num-seqs 64)",
        engine={"max_num_seqs": 64},
        at=("2.0",),
        of=LAYOUTS,
    ),
    "prompts_half": Change(
        words="prompts cost a layer of decode half as much",
        stages=lambda model: replace(model, beside_prompt_s=(model.beside_prompt_s or 0.0) / 2),
        of=(THREE_WEIGHTS,),
    ),
    "patience": Change(
        words="a third of the prompts' patience, as a rank's slice is a third (what decode pays taken as before)",
        patience=1 / 3,
        of=(THREE_WEIGHTS,),
    ),
    "chunk1k": Change(
        words="prefill steps of 1,024 tokens (--max-num-batched-tokens 1024)",
        engine={"max_num_batched_tokens": 1024},
        of=(THREE_WEIGHTS,),
    ),
    "ticket": Change(words="segments in order of readiness (--order ticket)", order="ticket", of=(THREE_WEIGHTS,)),
}
"""By name in metrics."""


def with_means(table: MeasuredTable) -> MeasuredTable:
    """Models of which it was not measured get the mean cost of prompts by layer, so that it can be changed."""
    found = {}
    for name, model in table.items():
        layers = catalogue_facts(name).num_layers
        found[name] = replace(model, beside_prompt_s=layers * sharing_of(table, name, layers).longer_s)
    return found


def simulate_change(
    trace: Path, seconds: float, layout: str, change: Change, table: MeasuredTable, times: int = TIMES
) -> list[GroupResult]:
    """So many simulations. table: before the change."""
    rows = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    changed = {name: change.stages(model) for name, model in with_means(table).items()}
    found = []
    for number in range(times):
        rng = random.Random(number)
        shift = SHIFT_S if number else 0.0
        sent = [{**row, "t": max(0.0, row["t"] + rng.uniform(-shift, shift))} for row in rows if row["t"] < seconds]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sent.jsonl"
            path.write_text("\n".join(map(json.dumps, sent)), encoding="utf-8")
            found.append(
                outlook(
                    path,
                    gpus_of(layout),
                    cast(Layout, layout.partition("-")[0]),
                    changed,
                    MODELS,
                    beside_share=beside_share(layout) if layout in GPU_LAYOUTS else 0.0,
                    engine=change.engine,
                    order=change.order,
                    patience=change.patience,
                )
            )
    return found


def gpus_of(layout: str) -> dict[str, int]:
    """As a plan has them: how many, and how many of them for KV in two pools."""
    pools = layout.partition("-")[2].partition("+")
    return {"count": num_gpus(layout), "kv": int(pools[0]) if pools[1] else 1}


def add_change(report: Report, layout: str, name: str, rate: str, groups: Sequence[GroupResult]) -> None:
    case = f"{layout}.{name}"
    for model in MODELS:
        bounds = TBT_MS.get((layout, rate), (None, None))
        for level, share, bound in zip(("p50", "p99"), (0.5, 0.99), bounds, strict=True):
            every_ms = [1e3 * group.models[model].tbt.quantile(share) for group in groups]
            told = f"simulated; {min(every_ms):.1f} to {max(every_ms):.1f}; {CHANGES[name].words}"
            report.metric(f"simulated_tbt_ms.{case}.{model}.{rate}.{level}", median(every_ms), limit=bound, note=told)
    for level, share in (("p50", 0.5), ("p99", 0.99)):
        ttft_ms = median(1e3 * group.total.ttft.quantile(share) for group in groups)
        report.metric(f"simulated_ttft_ms.{case}.all.{rate}.{level}", ttft_ms, note="simulated")
    tokens = median(group.total.num_tokens / group.duration_s for group in groups)
    report.metric(f"simulated_tokens_per_s.{case}.{rate}", tokens, note="simulated, to the last token")
    for index, station in enumerate(groups[0].stations[:2]):
        busy = median(1.0 - group.bubble_share(index) for group in groups)
        told = "simulated; of the time with steps in flight"
        report.metric(f"simulated_busy.{case}.{station}.{rate}", busy, limit=1.0, note=told)


def as_list(report: Report, rate: str, layouts: Sequence[str] = BY_GPUS[2]) -> str:
    """Markdown: what each change gives, a line for each that was simulated."""
    lines = []
    for layout in layouts:
        for name, change in changes_of(layout, rate).items():
            case = f"{layout}.{name}"
            if f"simulated_tokens_per_s.{case}.{rate}" not in report.metrics:
                continue
            figures = []
            for model in MODELS:
                p50, p99 = (report.metrics[f"simulated_tbt_ms.{case}.{model}.{rate}.{at}"] for at in ("p50", "p99"))
                figures.append(f"{model} {p50:.1f} / {p99:.1f}")
            tokens = report.metrics[f"simulated_tokens_per_s.{case}.{rate}"]
            ttft_ms = [report.metrics[f"simulated_ttft_ms.{case}.all.{rate}.{level}"] for level in ("p50", "p99")]
            lines.append(
                f"- {layout}, {change.words}: {', '.join(figures)} ms; {tokens:,.0f} tokens/s; first tokens after "
                f"{ttft_ms[0]:.0f} / {ttft_ms[1]:,.0f} ms"
            )
    return "\n".join(lines)


def changes_of(layout: str, rate: str) -> Mapping[str, Change]:
    """What is simulated of a layout at a rate, by name; of baselines nothing is changed."""
    return {name: change for name, change in CHANGES.items() if rate in change.at and layout in change.of}


def summary(report: Report, rates: Sequence[str], layouts: Sequence[str], seconds: float, times: int | None) -> str:
    """Markdown. times: of every case; none: the usual numbers."""
    counts = f"{times} simulation(s)" if times else f"{TIMES} simulations"
    lists = [f"At {rate} requests/s of each model:\n\n{as_list(report, rate, layouts)}" for rate in rates]
    how = (
        f"SIMULATED, nothing here was measured: the first {seconds:g} s of the trace of three models on as many H200s "
        f"as a layout's name says, from kept stage times, one change at a time; P50 / P99, medians of {counts} whose "
        f"arrivals differ by up to {1e3 * SHIFT_S:g} ms{'' if times else ', at 2.0 of one'}."
    )
    return "\n\n".join((how, *lists))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace-dir", type=Path, required=True, help="folder of sharegpt_<rate>.jsonl")
    parser.add_argument("--rates", nargs="+", default=list(RATES), choices=RATES)
    parser.add_argument("--gpus", type=int, default=2, choices=list(BY_GPUS), help="the most of a layout")
    parser.add_argument("--layouts", nargs="+", help="these alone, of those of so many GPUs")
    parser.add_argument("--changes", nargs="+", help="these alone", choices=list(CHANGES))
    parser.add_argument("--times", type=int, help=f"simulations of a case; usual: {TIMES}, at 2.0 one")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the trace")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    config = {"rates": args.rates, "seconds": args.seconds, "trace_dir": args.trace_dir.name}
    layouts = args.layouts or BY_GPUS[args.gpus]
    report = Report("layout_changes" if args.gpus == 2 else "layouts_simulated", hardware="cpu", config=config)
    tables = {is_present: stage_times(is_present=is_present) for is_present in (False, True)}
    for rate in args.rates:
        trace = args.trace_dir / f"sharegpt_{rate}.jsonl"
        for layout in layouts:
            for name, change in changes_of(layout, rate).items():
                if name not in (args.changes or CHANGES):
                    continue
                table, times = tables[change.is_present], args.times or NUM_SIMULATIONS[rate]
                groups = simulate_change(trace, args.seconds, layout, change, table, times)
                add_change(report, layout, name, rate, groups)
                print(f"{layout} {rate} {name}", flush=True)
    report.summary = summary(report, args.rates, layouts, args.seconds, args.times)
    for path in report.write(args.out):
        print(path)
    print(report.summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
