"""Does the resident FFN server answer a million rounds right, whatever the pauses between them?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_ffn_stress [--out DIRECTORY] [--rounds 1000000] [--racecheck]

Both sides on one GPU: a kernel on one multiprocessor stands where attention would be, waits a random while before each
put, and compares every sum of every round. Two servers on halves of the GPU stand for two weights ranks: what they
prove is the path of partial sums, not its speed.
"""

from __future__ import annotations

import argparse
import faulthandler
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.bench_ffn_server import prepare_routing
from benchmarks.crossings.ffn_client import FFNClient
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.crossings.single_rounds import small_spec
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.random_slices import random_ffn_slices
from crosspool.models.spec import ModelSpec

NUM_LAYERS = 12
SEED = 3
PASSES_AT_ONCE = 1000
PAUSE_MASK = 0x1FFF


def rounds_of(
    report: Report, name: str, spec: ModelSpec, *, batch: int, rounds: int, servers: int = 1, route: str = "ffn"
) -> None:
    """`rounds` layers after random pauses; the sums of every one must be those of the first pass, bit for bit."""
    gpus = OneGpu(servers)
    slices = random_ffn_slices(spec, SEED, gpus.devices[1:])
    client = FFNClient(gpus, slices, batch, seed=SEED + batch, takes_choices=route == "kv")
    prepare_routing(gpus, slices, client, "uniform", route)
    client.run(1)
    error = client.error()
    client.expect()
    begin, done = time.perf_counter(), 0
    while done < rounds:
        passes = min(PASSES_AT_ONCE, max(1, (rounds - done) // NUM_LAYERS))
        done += (len(client.run(passes, pause_mask=PAUSE_MASK)) + (3 if passes > 3 else 0)) * NUM_LAYERS
    seconds = time.perf_counter() - begin
    case = f"{name}.tp{servers}.b{batch}.{route}"
    note = f"random pauses of up to {PAUSE_MASK / 1e3:.0f} us, every sum compared; {seconds:.1f} s"
    report.metric(f"ffn_stress_rounds.{case}", done, note=note)
    report.metric(f"ffn_stress_wrong_sums.{case}", client.num_wrong, limit=0)
    report.metric(f"ffn_stress_error.{case}", error, limit=2e-3, note="of a layer's sums against float64")
    print(f"stress {case}: {done} rounds, {client.num_wrong} wrong sums, error {error:.1e}, {note}", flush=True)
    client.close()


def racecheck(report: Report, seconds: float) -> None:
    """Hazards in shared memory that the sanitizer sees in single rounds."""
    command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, "-m", "benchmarks.crossings.single_rounds"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    print(done.stdout[-3000:], done.stderr[-1500:], flush=True)
    found = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"racecheck ended with {done.returncode}; its output is above")
    note = "router, three kernels, one kernel and server; batches of 1, 3, 8 and 17 at small shapes"
    report.metric("ffn_racecheck_hazards", int(found.group(1)), limit=0, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at a small shape, batch 1; others fewer")
    parser.add_argument("--racecheck", action="store_true", help="run single rounds under compute-sanitizer too")
    parser.add_argument("--hang-seconds", type=float, default=240.0, help="give up where nothing ends")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    failures: dict[str, str] = {}
    report = Report("ffn_stress", hardware="h200", config={"num_layers": NUM_LAYERS}, seed=SEED)
    report.summary = (
        "The resident FFN server under random pauses, both sides on one GPU; tp2: two servers on halves of it."
    )
    few = options.rounds // 25
    small, full = small_spec("qwen3-30b-a3b", NUM_LAYERS), full_spec("qwen3-30b-a3b", NUM_LAYERS)
    shared = small_spec("deepseek-v2-lite", NUM_LAYERS)
    cases = [
        *(
            (f"small b{batch} {route}", "small", small, batch, few, 1, route)
            for batch in (8, 17)
            for route in ("ffn", "kv")
        ),
        ("shared experts", "small-shared", shared, 1, few, 1, "ffn"),
        *(
            (f"two servers b{batch} {route}", "small", small, batch, few, 2, route)
            for batch in (1, 8)
            for route in ("ffn", "kv")
        ),
        ("two servers, full size", "qwen3-30b-a3b", full, 1, few // 4, 2, "ffn"),
        *(
            (f"full size b{batch}", "qwen3-30b-a3b", full, batch, options.rounds // divisor, 1, "ffn")
            for batch, divisor in ((1, 10), (8, 100))
        ),
        ("a million", "small", small, 1, options.rounds, 1, "ffn"),
    ]
    for title, name, spec, batch, rounds, servers, route in cases:
        guarded(
            title,
            lambda n=name, s=spec, b=batch, r=rounds, c=servers, w=route: rounds_of(  # type: ignore[misc]
                report, n, s, batch=b, rounds=r, servers=c, route=w
            ),
            failures,
        )
        torch.cuda.empty_cache()
    if options.racecheck:
        report.write(options.out)  # the tool is slow
        guarded("racecheck", lambda: racecheck(report, options.hang_seconds / 2), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
