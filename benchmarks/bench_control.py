"""What does a decode step cost by what drives it: the host, graphs of one step, or runs that the device takes itself?

    python -m benchmarks.bench_control [--gpus 1|2] [--models a,b] [--context 4096] [--tokens 160] [--steps 8]
        [--server-sms 92] [--out DIRECTORY]

Full-size models, random weights, batch 1. Real workers and rank loops of one KV rank and one weights rank in one
thread, which naps where a host would; no engine and no processes. With one GPU both ranks share it, so that halves take
turns and crossings stay on it; the resident server then has a part of its multiprocessors, and attention the rest: this
shows what hosts do, and no speed. Greedy tokens of every way are compared with those of the first.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.ranks.driven import RANKS, DrivenRanks
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.executable import Executable
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import MAX_CONNECTIONS, ask_for_queues
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.pools_config import Control
from crosspool.units import MiB

SEED = 7
LANE_TOKENS_PER_S = 400
CORE_LIMIT = 5.0
WAYS: dict[str, tuple[Control, bool, tuple[str, ...]]] = {
    "graphs": ("graphs", False, RANKS),
    "runs": ("graphs", True, RANKS),
    "runs_apart": ("graphs", True, ()),
    "resident": ("resident", False, RANKS),
    "resident_apart": ("resident", False, ()),
    "resident_runs": ("resident", True, RANKS),
    "resident_runs_apart": ("resident", True, ()),
    "resident_runs_kv": ("resident", True, ("kv0",)),
    "resident_runs_w": ("resident", True, ("w0",)),
    "host": ("host", False, ()),
}
"""What drives, whether in runs, and whose devices get what is behind a lane's step before that has ended."""

TARGETS = {"host": {"qwen3-30b-a3b": 7.0}, "resident": {"qwen3-30b-a3b": 2.6}}


@contextmanager
def watched_launches() -> Iterator[list[tuple[float, float]]]:
    """Collects the microseconds of every launch of a graph: on the clock, and of processor time."""
    found: list[tuple[float, float]] = []
    launch = Executable.launch

    def timed(graph: Executable, stream: Any) -> None:
        used_s, begin_s = time.thread_time(), time.perf_counter()
        launch(graph, stream)
        found.append((1e6 * (time.perf_counter() - begin_s), 1e6 * (time.thread_time() - used_s)))

    setattr(Executable, "launch", timed)  # noqa: B010 - it is a method
    try:
        yield found
    finally:
        setattr(Executable, "launch", launch)  # noqa: B010


class Bench:
    """One model at a time on one or two GPUs; weights and cache are drawn once for all ways."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report, self.steps = options, report, int(options.steps)
        ask_for_queues()
        self.gpus = (0, 1) if options.gpus == 2 else (0, 0)
        made = {gpu: DeviceKernels(torch.device("cuda", gpu)) for gpu in sorted(set(self.gpus))}
        self.kernels = (made[self.gpus[0]], made[self.gpus[1]])
        self.devices = (torch.device("cuda", self.gpus[0]), torch.device("cuda", self.gpus[1]))
        for gpu in set(self.gpus):
            with torch.cuda.device(gpu):
                for peer in set(self.gpus) - {gpu}:
                    Driver("bench").enable_peer_access(peer)

    def model(self, name: str) -> None:
        begin_s = time.perf_counter()
        spec = full_spec(name)
        devices, self.spec = self.devices, spec
        self.attention = random_attention_weights(spec, SEED, devices[0])
        self.layers = random_ffn_weights(spec, SEED, devices[1])
        self.arena = torch.zeros(self.options.frames, 2 * MiB, dtype=torch.uint8, device=devices[0])
        generator = torch.Generator(device=devices[0]).manual_seed(SEED)
        self.arena.view(torch.bfloat16).normal_(0, 0.5, generator=generator)
        for device in devices:
            torch.cuda.synchronize(device)
        print(f"{name}: drawn after {time.perf_counter() - begin_s:.1f} s", flush=True)
        tokens: list[int] = []
        for way in self.options.ways.split(","):
            control, is_run, ahead = WAYS[way]
            steps = self.steps if is_run else 1
            ranks = self.ranks(control, ahead)
            found = self.one_lane(ranks, name, way, steps)
            tokens = tokens or found
            same = sum(a == b for a, b in zip(tokens, found, strict=True))
            self.report.metric(f"same_tokens.{name}.{way}", same, limit=len(tokens), note="as by graphs")
            if steps > 1:
                self.asleep(ranks, name, way)
                self.early_end(ranks, name, way, tokens)
            self.two_lanes(ranks, name, way, steps, tokens)
            self.report.write(self.options.out)
            del ranks
            gc.collect()  # now: what frees device memory waits for the device, which may wait for this thread
        self.add_gaps(name)

    def ranks(self, control: Control, ahead: tuple[str, ...]) -> DrivenRanks:
        kernels: tuple[Any, Any] = self.kernels
        if control == "resident" and self.options.gpus == 1:
            whole, server_sms = self.kernels[0], self.options.server_sms
            kernels = (MostOfAGpu(whole, whole.num_sms - server_sms), MostOfAGpu(whole, server_sms))
        return DrivenRanks(
            kernels,
            self.devices,
            self.spec,
            self.attention,
            self.layers,
            self.arena,
            control,
            num_lanes=2,
            ahead=ahead,
        )

    def add_gaps(self, name: str) -> None:
        """What a host takes between two descriptors of a lane where the device waits for it."""
        metrics = self.report.metrics
        for way, (_, is_run, _) in WAYS.items():
            steps = self.steps if is_run else 1
            apart, ahead = metrics.get(f"step_ms.{name}.{way}_apart"), metrics.get(f"step_ms.{name}.{way}")
            if apart is not None and ahead is not None:
                gap_us = 1e3 * steps * (apart - ahead)
                note = f"between two descriptors of {steps} steps, by steps' times with and without"
                self.report.metric(f"host_gap_us.{name}.{way}", gap_us, note=note)

    def one_lane(self, ranks: DrivenRanks, name: str, way: str, steps: int) -> list[int]:
        """Time a token, and processor time of the thread that drives both ranks."""
        count = self.options.tokens
        ranks.generate([(0, ranks.sequence(self.options.context))], 6 * self.steps, steps)  # captures, warms up
        sequence = ranks.sequence(self.options.context)
        begin_s, used_s = time.perf_counter(), time.thread_time()
        with watched_launches() as launches:
            moments = ranks.generate([(0, sequence)], count, steps)
        used_s, wall_s = time.thread_time() - used_s, time.perf_counter() - begin_s
        step_ms = 1e3 * (moments[-1] - moments[self.steps]) / (count - 1 - self.steps)
        label = f"{name}.{way}"
        self.report.metric(f"step_ms.{label}", step_ms, note=f"asked {TARGETS.get(way, {}).get(name, '-')}")
        self.report.metric(f"launches_per_token.{label}", len(launches) / count, note="of graphs, on both ranks")
        self.report.samples(f"launch_us.{label}", [wall for wall, _ in launches])
        self.report.samples(f"launch_cpu_us.{label}", [cpu for _, cpu in launches])
        share = 100 * used_s / wall_s
        self.report.metric(f"host_core_percent.{label}", share, note="of both ranks, while it decodes alone")
        if steps > 1:
            lane = share * LANE_TOKENS_PER_S * step_ms / 1e3
            self.report.metric(
                f"host_core_percent.lane.{label}", lane, limit=CORE_LIMIT, note=f"at {LANE_TOKENS_PER_S} tokens/s"
            )
            self.report.metric(f"host_us_per_step.{label}", 1e6 * used_s / count, limit=60.0, note="of both ranks")
        print(f"  {way}: {step_ms:.3f} ms a token, {share:.1f} % of a core", flush=True)
        return sequence.tokens

    def asleep(self, ranks: DrivenRanks, name: str, way: str) -> None:
        """Tokens of a run that were there after its host had slept from the launch on: no host event lies between."""
        sequence = ranks.sequence(self.options.context)
        ranks.submit(ranks.begin(0, sequence))
        while not any(has_ended for _, _, has_ended in ranks.take()):
            ranks.turn()
        ranks.submit(ranks.decode(0, [sequence], self.steps))
        while not ranks.may_nap:
            ranks.turn()
        step_s = self.report.metrics[f"step_ms.{name}.{way}"] / 1e3
        time.sleep(1.5 * self.steps * step_s)
        woken_s, found = time.perf_counter(), 0
        while time.perf_counter() - woken_s < step_s / 2:
            ranks.turn()
            found += len(ranks.take())
        self.report.metric(
            f"tokens_while_host_slept.{name}.{way}",
            found,
            limit=self.steps,
            note="of a run, read within half a step's time",
        )
        print(f"  asleep: {found} of {self.steps} tokens", flush=True)

    def early_end(self, ranks: DrivenRanks, name: str, way: str, tokens: list[int]) -> None:
        """A run whose stop token comes in its middle: it gives the tokens up to that, and the lane goes on at once."""
        first = next((i for i in range(3, self.steps) if tokens[i] not in tokens[:i]), None)
        if first is None:
            print("  early end: no token of the run is new", flush=True)
            return
        sequence = ranks.sequence(self.options.context, stop_ids=(tokens[first],))
        begin_s = time.perf_counter()
        ranks.generate([(0, sequence)], 1 + self.steps, self.steps)
        ended_s = time.perf_counter()
        again = ranks.sequence(self.options.context)
        ranks.generate([(0, again)], 1 + self.steps, self.steps)
        is_right = sequence.tokens == tokens[: first + 1] and again.tokens == tokens[: 1 + self.steps]
        self.report.metric(f"early_end_is_right.{name}.{way}", int(is_right), limit=1)
        self.report.metric(f"early_end_ms.{name}.{way}", 1e3 * (ended_s - begin_s), note=f"{first + 1} steps of a run")
        print(f"  early end after {first + 1}: {'right' if is_right else sequence.tokens}", flush=True)

    def two_lanes(self, ranks: DrivenRanks, name: str, way: str, steps: int, tokens: list[int]) -> None:
        """Two sequences in two lanes: tokens as alone, and tokens/s of both."""
        count = self.options.tokens // 2
        lanes = [(lane, ranks.sequence(self.options.context, slot=lane)) for lane in range(2)]
        ranks.generate(lanes, 6 * self.steps, steps)
        lanes = [(lane, ranks.sequence(self.options.context, slot=lane)) for lane in range(2)]
        moments, edge = ranks.generate(lanes, count, steps), 2 * self.steps
        rate = (len(moments) - 2 * edge) / (moments[-edge] - moments[edge])
        same = sum(a == b for a, b in zip(tokens, lanes[0][1].tokens, strict=False))
        self.report.metric(f"two_lanes_tokens_per_s.{name}.{way}", rate)
        learned = [ranks.step_ms(lane) for lane in range(2)] if steps > 1 else []
        for lane, step_ms in enumerate(learned):
            self.report.metric(f"two_lanes_step_ms.{name}.{way}.{lane}", step_ms, note="within runs")
        self.report.metric(f"two_lanes_same_tokens.{name}.{way}", same, limit=count, note="the first lane's, as alone")
        print(
            f"  two lanes: {rate:.0f} tokens/s, {same} of {count} tokens as alone, steps within runs {learned} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--server-sms", type=int, default=92, help="multiprocessors of the server that shares a GPU")
    parser.add_argument("--name", default="control", help="of the result")
    parser.add_argument("--frames", type=int, default=1200, help="of 2 MiB, of the KV pool")
    parser.add_argument("--hang-seconds", type=float, default=120.0, help="give up where nothing ends")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gc.disable()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    config = {"context": options.context, "tokens": options.tokens, "steps_of_a_run": options.steps, "batch": 1}
    config["queues"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", MAX_CONNECTIONS)
    hardware = "h200" if options.gpus == 1 else "h200-x2"
    report = Report(options.name, hardware=hardware, config=config, seed=SEED)
    report.summary = "One lane at batch 1 by what drives it; runs are loops on the device, read behind by the host."
    bench = Bench(options, report)
    for name in options.models.split(","):
        bench.model(name)
        report.write(options.out)
        torch.cuda.empty_cache()
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
