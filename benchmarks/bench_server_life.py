"""How soon is an FFN server that has left its GPU there again, and what does one that waits draw?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_server_life [--rounds 200] [--out DIRECTORY]

One GPU. Rows lie ready for a pass before it is posted; its answer is awaited, once with the server there and once after
it has left: what that takes longer is the restart. Power is the driver's, after two seconds without work.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from benchmarks.crossings.asked_lane import AskedLane
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.full_models import full_spec
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer

SEED, NUM_LAYERS, RESTART_LIMIT_MS = 7, 4, 1.0
ROWS_READY_S, SETTLED_S, DEADLINE_S = 2e-3, 2.0, 2.0
WARM_UP_ROUNDS = 40
"""Some 0.2 s, until clocks are up."""


def answer_ms(lane: AskedLane, server: FFNServer) -> float:
    """From the post of a pass, whose first rows lie ready, to its last answer."""
    lane.ask(lane.params(1, 0))
    time.sleep(ROWS_READY_S)
    stamps, begin_s = lane.stamps.numpy(), time.perf_counter()
    lane.post(server)
    while stamps[1] == 0:
        if time.perf_counter() - begin_s > DEADLINE_S:
            raise RuntimeError("the server did not answer")
    ended_s = time.perf_counter()
    lane.check()
    return 1e3 * (ended_s - begin_s)


def restarts(gpus: OneGpu, lane: AskedLane, report: Report, rounds: int) -> None:
    server = FFNServer(lane.side.kernels, gpus.devices[0], [lane.side.lane])
    answer_ms(lane, server)
    there, left, stops_ms = [], [], []
    for _ in range(WARM_UP_ROUNDS + rounds):
        there.append(answer_ms(lane, server))
        begin_s = time.perf_counter()
        server.stop()
        stops_ms.append(1e3 * (time.perf_counter() - begin_s))
        left.append(answer_ms(lane, server))
    server.stop()
    there, left, stops_ms = there[WARM_UP_ROUNDS:], left[WARM_UP_ROUNDS:], stops_ms[WARM_UP_ROUNDS:]
    report.samples("server_answer_ms.there", there, note=f"a pass of {NUM_LAYERS} layers")
    report.samples("server_answer_ms.left", left, note="the same, with the launch")
    report.samples("server_stop_ms", stops_ms, note="until a server that waits has left")
    more = [slow - quick for slow, quick in zip(left, there, strict=True)]
    report.samples("server_restart_ms", more, limit=RESTART_LIMIT_MS, note="what it takes longer; the target")


def power(gpus: OneGpu, lane: AskedLane, report: Report) -> None:
    time.sleep(SETTLED_S)
    report.metric("idle_watts.without", power_watts(), note="nothing runs")
    server = FFNServer(lane.side.kernels, gpus.devices[0], [lane.side.lane], idle_s=2 * SETTLED_S)
    answer_ms(lane, server)
    time.sleep(SETTLED_S)
    waiting = power_watts()
    has_left = server.has_left
    server.stop()
    if has_left:
        raise RuntimeError("the server left before its power was read")
    report.metric("idle_watts.resident", waiting, note="the server waits for a pass")


def power_watts() -> float:
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpus, model = OneGpu(), "deepseek-v2-lite"
    config = {"model": model, "layers": NUM_LAYERS, "rounds": options.rounds, "batch": 1}
    report = Report("server_life", hardware="h200", config=config, seed=SEED)
    report.summary = "The FFN server's restart, stop and idle power, one H200."
    layers = random_ffn_weights(full_spec(model, NUM_LAYERS), SEED, gpus.devices[0])
    lane = AskedLane(gpus, layers, 1, "resident", SEED)
    restarts(gpus, lane, report, options.rounds)
    report.write(options.out)
    power(gpus, lane, report)
    report.write(options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
