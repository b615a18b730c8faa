"""Two pools beside a static partition and an elastic pool on two GPUs: three full-size models, one trace, over HTTP.

    python -m benchmarks.bench_layouts_gpu --trace-dir TRACES --runs FOLDER LAYOUT:RATE[:SECONDS] ...
    python -m benchmarks.bench_layouts_gpu --trace-dir TRACES --runs FOLDER \\
        crosspool-1+1:0.8 crosspool-1+1:2.0 static-2:0.8 elastic-2:0.8

`crosspool serve --backend cuda --weights random` in each layout in turn gets the requests of sharegpt_<rate>.jsonl of
the folder TRACES (JSON lines: t, model, in, out) from the client of `crosspool bench`, temperature 1. Loads of one
layout that follow each other share a server. What has been measured is kept in the folder of runs and found again, so
that several calls, or one that was broken off, make one report; a layout that fails is told, and the others go on.
With --plan nothing runs: commands, what every GPU would hold, and the requests are printed. Where there is no GPU, the
NumPy backend serves the demo models in the same layouts (`bench_layouts`), and says so.
LAYOUT.VARIANT (see VARIANTS): the same, otherwise set.

Metrics are those of `bench_layouts`, and sent_rps.<layout>.<model>.<rate>; alone_tbt_ms.<layout>.<model>.4k.p50: one
request, nothing else being served; tbt_<company>_ms.<layout>.<model>.<rate>.p50: times between tokens while a prompt of
any model was under way, while another model decoded, and while neither did; gpu_used_gib.<layout>.<gpu>;
one_request_tokens.<model>.<layout>: what the memory beside weights and all else would hold of one request; simulated_*:
the simulator's word on traces named with --outlook.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import bench_layouts
from benchmarks.full_models import write_model_dir
from benchmarks.layouts.account import plan_lines
from benchmarks.layouts.memory import held_memory
from benchmarks.layouts.picture import write_pictures
from benchmarks.layouts.report import add_outlook, layouts_report, measured_loads
from benchmarks.layouts.runs import Runs, alone_ms, gpu_memory, greedy_words, loaded, warm_up_together
from benchmarks.layouts.server import GPU_LAYOUTS, LAYOUTS, VARIANTS, layout_server
from benchmarks.report import RESULTS
from crosspool.bench.requests import planned_requests
from crosspool.bench.settings import BenchSettings
from crosspool.bench.traffic import realised_rates
from crosspool.errors import CrossPoolError

MODELS = ("glm-4.7-flash", "qwen3-30b-a3b", "deepseek-v2-lite")
"""In turn over the places of a baseline: the two that fit together share one, as in the peers' static layout."""

PROMPT_TOKENS, ANSWER_TOKENS = 4096, 160
VOCABULARY = 100_000
SEED = 2026
SECONDS_ON_CPUS = 20.0
"""Of a trace, where the command says none and there is no GPU."""


@dataclass(frozen=True, slots=True)
class Load:
    """One run: a layout, maybe of a variant, and the trace of a rate as far as `seconds`."""

    layout: str
    rate: str
    seconds: float | None

    @classmethod
    def parse(cls, text: str) -> Load:
        """Raises ValueError for what is no LAYOUT:RATE[:SECONDS]."""
        layout, _, rest = text.partition(":")
        rate, _, seconds = rest.partition(":")
        kind, _, variant = layout.partition(".")
        if not rate or kind not in GPU_LAYOUTS or (variant and variant not in VARIANTS):
            raise ValueError(f"a load is {text!r}; give LAYOUT:RATE or LAYOUT:RATE:SECONDS, as crosspool-1+1:0.8")
        return cls(layout, rate, float(seconds) if seconds else None)

    @property
    def name(self) -> str:
        return f"load_{self.layout}_{self.rate}" + (f"_{self.seconds:g}s" if self.seconds else "")

    @property
    def flags(self) -> tuple[str, ...]:
        variant = self.layout.partition(".")[2]
        return VARIANTS[variant] if variant else ()

    def settings(self, url: str, trace_dir: Path, models: Sequence[str]) -> BenchSettings:
        return BenchSettings(
            base_url=(url,),
            models=tuple(models),
            trace=trace_dir / f"sharegpt_{self.rate}.jsonl",
            duration_s=self.seconds,
            temperature=1.0,
            vocab_size=VOCABULARY,
            seed=SEED,
            skips_unserved=True,  # where --models leaves some out
            num_warmups=0,  # `warm_up_together` has been
            detailed=True,
        )


def measure(
    args: argparse.Namespace, runs: Runs, layout: str, loads: Sequence[Load], directories: Sequence[Path]
) -> None:
    """Everything of one layout that is not there yet, behind one server."""
    names = [directory.name for directory in directories]
    wanted = [load for load in loads if runs.find(load.name) is None]
    if not wanted:
        return
    log = args.runs / f"server_{layout}.log"
    flags = [*served_with(args.kv_pool_bytes), "--log-level", "warning", *wanted[0].flags]
    begin = time.monotonic()
    try:
        with layout_server(layout.partition(".")[0], directories, args.port, flags, log, GPU_LAYOUTS) as url:
            runs.get(f"memory_{layout}", lambda: held_memory(url))
            print(f"{layout}: ready after {time.monotonic() - begin:.1f} s", flush=True)
            for name in names if not args.loads_only else ():
                runs.get(f"answers_{layout}_{name}", partial(_answers, url, name))
                gaps = runs.get(f"alone_{layout}_{name}", partial(_alone, url, name))["gaps_ms"]
                print(f"{layout}: {name} alone {sorted(gaps)[len(gaps) // 2]:.2f} ms", flush=True)
            warm_up_together(url, names, SEED)
            for load in wanted:
                settings = load.settings(url, args.trace_dir, names)
                label = f"{layout}, {load.rate} requests/s of each model"
                runs.get(load.name, partial(loaded, settings, label))
    finally:
        print(f"{layout}: the server's last words\n{log.read_text(errors='replace')[-args.log_tail :]}", flush=True)


def served_with(kv_pool_bytes: str) -> tuple[str, ...]:
    """Flags of every layout."""
    return ("--backend", "cuda", "--weights", "random", "--kv-pool-bytes", kv_pool_bytes, "--no-enable-prefix-caching")


def print_plan(args: argparse.Namespace) -> bool:
    """What would run, and on which GPUs, where nothing is started. Whether it fits and every trace is there."""
    is_ready = True
    for layout, group in groupby(args.loads, lambda load: load.layout):
        loads = list(group)
        kind = layout.partition(".")[0]
        flags = (*GPU_LAYOUTS[kind], *served_with(args.kv_pool_bytes), *loads[0].flags)
        lines, fits = plan_lines(layout, flags, args.models)
        print("\n".join(lines))
        for load in loads:
            sent = planned_requests(load.settings("http://localhost", args.trace_dir, args.models), args.models)
            rates = ", ".join(f"{name} {rate:.2f}/s" for name, rate in realised_rates(sent, sent[-1].due_s).items())
            print(f"  {load.name}: {len(sent)} requests in {sent[-1].due_s:.0f} s; {rates}")
        is_ready = is_ready and fits
    return is_ready


def on_cpus(args: argparse.Namespace) -> int:
    """The same layouts and rates on the NumPy backend, which it says."""
    layouts = dict.fromkeys(kind for load in args.loads if (kind := load.layout.partition(".")[0]) in LAYOUTS)
    if not layouts:
        print("error: there is no GPU here, and none of these layouts runs on CPUs; there are", ", ".join(LAYOUTS))
        return 1
    print("there is no GPU here: the NumPy backend serves the demo models in these layouts, without their variants")
    seconds = max(load.seconds or SECONDS_ON_CPUS for load in args.loads)
    words = ["--layouts", *layouts, "--rates", *dict.fromkeys(load.rate for load in args.loads)]
    words += ["--trace-dir", str(args.trace_dir), "--seconds", f"{seconds:g}", "--port", str(args.port)]
    return bench_layouts.main([*words, "--out", str(args.out)])


def _answers(url: str, name: str) -> dict[str, Any]:
    return {"words": greedy_words(url, name)}


def _alone(url: str, name: str) -> dict[str, Any]:
    alone_ms(url, name, PROMPT_TOKENS, 8)
    return {"gaps_ms": alone_ms(url, name, PROMPT_TOKENS, ANSWER_TOKENS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("loads", nargs="*", type=Load.parse, metavar="LAYOUT:RATE[:SECONDS]")
    parser.add_argument("--trace-dir", type=Path, required=True, help="folder of sharegpt_<rate>.jsonl")
    parser.add_argument("--runs", type=Path, required=True, help="where measurements are kept and found")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--kv-pool-bytes", default="60GiB", help="of all layouts alike")
    parser.add_argument("--port", type=int, default=8437)
    parser.add_argument("--log-tail", type=int, default=1500)
    parser.add_argument(
        "--outlook", nargs="*", default=[], metavar="RATE", help="simulate these traces on two GPUs too"
    )
    parser.add_argument("--commit", help="that was measured, where the checkout does not tell")
    parser.add_argument("--note", default="", help="what the report says first")
    parser.add_argument("--loads-only", action="store_true", help="no request alone, and no answers to compare")
    parser.add_argument("--measure-only", action="store_true", help="leave the report to a later call without loads")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan", action="store_true", help="print commands, GPUs and requests; no GPU is needed")
    args = parser.parse_args()
    if args.plan:
        try:
            return 0 if print_plan(args) else 1
        except ValueError as error:
            print(f"error: {error}")
            return 1
    if args.loads and not gpu_memory():
        return on_cpus(args)
    runs = Runs(args.runs)
    with tempfile.TemporaryDirectory() as folder:
        directories = [write_model_dir(Path(folder), name) for name in args.models]
        failed = [
            layout
            for layout, loads in groupby(args.loads, lambda load: load.layout)
            if not _is_measured(args, runs, layout, list(loads), directories)
        ]
    if not args.measure_only:
        write_report(args, runs)
    return 1 if failed else 0


def _is_measured(
    args: argparse.Namespace, runs: Runs, layout: str, loads: Sequence[Load], directories: Sequence[Path]
) -> bool:
    """Measure the layout; one that fails is told, and the others go on."""
    try:
        measure(args, runs, layout, loads, directories)
    except (CrossPoolError, ValueError, RuntimeError, OSError, HTTPException) as failure:
        print(f"{layout}: FAILED: {failure}", flush=True)
        return False
    return True


def write_report(args: argparse.Namespace, runs: Runs) -> None:
    """Of all that is in the folder of runs."""
    report = layouts_report(runs, args.models, {"kv_pool_bytes": args.kv_pool_bytes}, args.commit)
    for rate in args.outlook:
        add_outlook(report, args.trace_dir / f"sharegpt_{rate}.jsonl", rate, args.models)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = write_pictures(args.out, report.stem, measured_loads(runs), args.models)
    links = [f"![times between tokens by layout]({path.name})" for path in pictures]
    report.summary = "\n\n".join(part for part in (args.note, report.summary, *links) if part)
    for path in (*pictures, *report.write(args.out)):
        print(path)
    print(report.as_markdown())


if __name__ == "__main__":
    raise SystemExit(main())
