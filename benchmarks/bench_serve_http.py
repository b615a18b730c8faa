"""Full-size models behind `crosspool serve` on GPUs, and the openai client: prompts, a very long one, ranks killed.

    python -m benchmarks.bench_serve_http [--parts prefill,long,faults] [--requests 45] [--fault-s 60]
        [--long-tokens 131072] [--kv-bytes 60GiB] [--more=--batch-invariant] [--gpus 1 --layers 12]

Random weights, drawn or from checkpoints (--parent), one server for all parts. `prefill`: 4K and 32K of every model,
alone and beside decode. `long`: a very long prompt of GLM while the others answer. `faults`: streams of every model,
prompts of 20 to 3,000 tokens, greedy, first undisturbed, then while each kind of rank is killed and stopped (SIGSTOP);
kept as a result of its own. With --gpus 1 both pools share a GPU, which switches between their processes: that shows
what survives, and no speed.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
from pathlib import Path

from benchmarks.full_models import CONFIGS
from benchmarks.report import RESULTS, Report
from benchmarks.served.clients import Clients
from benchmarks.served.faults import FAULTS, FaultPlan, faults
from benchmarks.served.process import ServedProcess
from benchmarks.served.prompts import first_tokens, long_prompt


async def run(options: argparse.Namespace) -> None:
    names = options.models.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "server.log"
    num_layers = options.layers or None
    config = {"models": names, "layers": options.layers, "kv": options.kv_bytes, "more": options.more}
    hardware = "h200" if options.gpus == 1 else f"h200-x{options.gpus}"
    where = "on one GPU for both pools" if options.gpus == 1 else "on one KV GPU and one weights GPU"
    report = Report("serve_http", hardware=hardware, config=config, seed=7)
    report.summary = f"crosspool serve with models of the true shapes {where}, over HTTP."
    recovery = Report(options.name, hardware=hardware, config=config, seed=7)
    recovery.summary = f"Each kind of rank killed and stopped under mixed traffic over HTTP, {where}."
    if options.parent is not None:
        recovery.summary += " Weights come from checkpoints in the page cache, at the start and after each loss."
    more = [*options.more.split(), *(["--gpus", "1"] if options.gpus == 1 else [])]
    server = ServedProcess(names, options.kv_bytes, log, more, options.parent, num_layers)
    try:
        report.metric("ready_s", server.wait_ready(), note="from the start of the process")
        print(f"ready after {report.metrics['ready_s']:.1f} s", flush=True)
        query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"]
        print(subprocess.run(query, capture_output=True, text=True, check=False).stdout, flush=True)
        clients = Clients()
        for part in options.parts.split(","):
            if part == "prefill":
                await first_tokens(clients, report, names, [int(context) for context in options.contexts.split(",")])
            elif part == "long":
                await long_prompt(clients, report, names, options.long_tokens)
            elif part == "faults":
                plan = FaultPlan(options.requests, options.answer_tokens, options.fault_s, made(options.faults))
                await faults(clients, server, recovery, names, plan, options.out)
            else:
                raise ValueError(f"--parts has {part!r}; it takes prefill, long and faults")
    finally:
        for each in (report, recovery):
            if len(each.metrics) > 1:
                each.write(options.out)
        server.close()
        print(log.read_text(errors="replace")[-options.log_tail :], flush=True)


def made(text: str) -> tuple[tuple[str, str], ...]:
    """(rank, signal) of each fault of the command line."""
    pairs = [fault.partition(":") for fault in text.split(",")]
    return tuple((rank, kind) for rank, _, kind in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--parts", default="prefill,long,faults", help="in this order")
    parser.add_argument(
        "--parent", type=Path, help="of the models' checkpoints, as bench_reload --only-write leaves them"
    )
    parser.add_argument("--contexts", default="4096,32768", help="of prefill")
    parser.add_argument("--kv-bytes", default="60GiB")
    parser.add_argument("--long-tokens", type=int, default=131072)
    parser.add_argument("--requests", type=int, default=45, help="different ones, asked again and again")
    parser.add_argument("--faults", default=",".join(f"{rank}:{kind}" for rank, kind in FAULTS), help="in this order")
    parser.add_argument("--answer-tokens", type=int, default=120, help="of each of them")
    parser.add_argument("--name", default="recovery", help="of the faults' result")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="of every model, the first ones; 0: all")
    parser.add_argument("--fault-s", type=float, default=60.0, help="every fault once, then again until then")
    parser.add_argument("--more", default="", help="further flags of `crosspool serve`, such as --batch-invariant")
    parser.add_argument("--log-tail", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
