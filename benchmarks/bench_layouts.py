"""Two pools beside a static partition and an elastic pool: the same models, load, engine and memory.

    python -m benchmarks.bench_layouts                                    # NumPy backend, demo models
    python -m benchmarks.bench_layouts --trace-dir TRACES --rates 0.8 2.0 # sharegpt_<rate>.jsonl of that folder

Each layout (`layouts/server.py`) is served in turn and gets the same requests from `crosspool bench`: Poisson
arrivals at `rate` requests/s of each model, lengths as in ShareGPT (prompt mean 862, answer mean 584, cut at 8,000 and
600), drawn from the seed or read from a folder of traces. On the demo models, whose context is 1,024, all lengths are
scaled by --length-scale.

tbt_ms.<layout>.<model>.<rate>.<p50|p95|p99>, ttft_ms.<layout>.all.<rate>.<p50|p99>, tokens_per_s.<layout>.<rate>,
served.<layout>.<rate> (share of requests); one_request_tokens.<model>.<layout>: the longest request that is served,
in a pool of --context-pool-bytes; and ratios (`layouts/figures.py`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.layouts.figures import add_layout_ratios, add_load
from benchmarks.layouts.server import LAYOUTS, context_limits, layout_server, longest_request
from benchmarks.report import RESULTS, Report
from crosspool.bench.run import run
from crosspool.bench.settings import BenchSettings
from crosspool.demo.scenario import demo_model_dirs
from crosspool.workload.traces import read_trace

PROMPT, OUTPUT = "862~1.0", "584~0.2"
DEFAULT_LAYOUTS = ("crosspool-1+1", "static-2", "elastic-2")


def bench_settings(args: argparse.Namespace, urls: tuple[str, ...], models: Sequence[str], rate: str) -> BenchSettings:
    """The same load for every layout."""
    common: dict[str, Any] = {
        "base_url": urls,
        "models": tuple(models),
        "duration_s": args.seconds,
        "max_model_len": args.max_model_len,
        "seed": args.seed,
        "num_warmups": 2,
    }
    if args.trace_dir is not None:
        trace = args.trace_dir / f"sharegpt_{rate}.jsonl"
        names = zip(sorted(read_trace(trace).models), sorted(models), strict=True)
        return BenchSettings(
            **common,
            trace=trace,
            trace_names=tuple(f"{old}={new}" for old, new in names),
            length_scale=args.length_scale,
        )
    scaled = []
    for text in (PROMPT, OUTPUT):
        mean, _, cv = text.partition("~")
        scaled.append(f"{float(mean) * args.length_scale:g}~{cv}")
    return BenchSettings(**common, request_rate=(rate,), input_len=(scaled[0],), output_len=(scaled[1],))


def measure(args: argparse.Namespace, report: Report, directories: Sequence[Path], log: Path) -> None:
    names = [directory.name for directory in directories]
    for layout in args.layouts:
        common = ("--frame-bytes", args.frame_bytes, "--no-enable-prefix-caching")
        for rate in args.rates:
            flags = ("--kv-pool-bytes", args.kv_pool_bytes, *common)
            with layout_server(layout, directories, args.port, flags, log) as url:
                told = StringIO()
                result = run(bench_settings(args, (url,), names, rate), console=Console(file=told, width=110))
            print(f"== {layout}, {rate} requests/s of each model\n{told.getvalue()}", flush=True)
            add_load(report, layout, rate, result)
            note = "runnable processes; above its cores: noise"
            report.metric(f"machine_load.{layout}.{rate}", os.getloadavg()[0], note=note)
        flags = ("--kv-pool-bytes", args.context_pool_bytes, *common)
        with layout_server(layout, directories, args.port, flags, log) as url:
            for model, limit in context_limits(url).items():
                tokens = longest_request(url, model, limit)
                report.metric(f"one_request_tokens.{model}.{layout}", tokens, note="served; one token more is refused")
                print(f"{layout}: one request of {model} gets {tokens} tokens", flush=True)
    add_layout_ratios(report, names, args.rates, ("static-2", "elastic-2"))


def main(words: Sequence[str] | None = None) -> int:
    """words: the command line's, if None."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layouts", nargs="+", default=list(DEFAULT_LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rates", nargs="+", default=["0.8"])
    parser.add_argument("--trace-dir", type=Path, help="folder of sharegpt_<rate>.jsonl")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which requests arrive")
    parser.add_argument("--length-scale", type=float, default=0.1)
    parser.add_argument("--max-model-len", type=int, default=1000)
    parser.add_argument("--kv-pool-bytes", default="48MiB", help="of all layouts alike")
    parser.add_argument("--context-pool-bytes", default="3MiB", help="where the longest request is looked for")
    parser.add_argument("--frame-bytes", default="64KiB")
    parser.add_argument("--port", type=int, default=8437)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    config = {**vars(args), "trace_dir": args.trace_dir.name if args.trace_dir else None, "out": None}
    report = Report("layouts", hardware="cpu", config=config, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, report, list(demo_model_dirs().values()), Path(folder) / "server.log")
    loads = [value for name, value in report.metrics.items() if name.startswith("machine_load.")]
    report.summary = (
        "NumPy backend, the three demo models on CPU processes: shows that the layouts serve and are measured alike. "
        "Processes of one machine share its cores and memory bandwidth, so no figure here says anything about GPUs. "
        f"The machine's load was up to {max(loads):.0f} on {os.cpu_count()} cores."
    )
    for path in report.write(args.out):
        print(path)
    print(report.as_markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
