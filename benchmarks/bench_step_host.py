"""What does a single decode step cost the thread of each rank: its descriptor, the launch, and the read of its tokens?

    python -m benchmarks.bench_step_host [--models a,b] [--modes graphs,resident] [--batches 1,8] [--out DIRECTORY]
    python -m benchmarks.bench_step_host --no-devices

Real workers and rank loops of one KV rank and one weights rank in one thread, both on one GPU; all layers of a kind
share weights, since no host knows. Metrics of more rows than one name them (`b8`). `lone`: the host has slept while the
devices were at the step, as in serving. `steady`: it has not. With --no-devices there is no GPU and none of a driver's
calls in the figures, and `lone` steps find nothing of their host in the processor's caches, which is more than a sleep
does to them.

A machine's cores may be shared, or slower than another's. So steady and lone steps take turns in rounds, and before and
behind each a loop of Python is timed, which is no part of what is measured. `quiet` is the median of the rounds beside
which that loop took hardly longer than it ever did in this run.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.python_pace import pace_us, timer_us
from benchmarks.ranks.driven import DrivenRanks, Sequence_
from benchmarks.ranks.lone_steps import host_us, warmed_up
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import ModelSpec
from crosspool.pools_config import Control
from crosspool.units import MiB

SEED, CONTEXT, FRAMES_A_ROW = 7, 1024, 128
WARM_UP = 24
STEPS_A_ROUND = {"steady": 80, "lone": 25}
RANKS = ("kv0", "w0")
QUIET = 1.1
"""So much longer than at its quickest the loop of Python may take beside a quiet round."""
LIMIT_US = 60.0
CACHE_BYTES = 64 * MiB
SMALL = {"vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 32, "intermediate_size": 32}


def small_spec(name: str) -> ModelSpec:
    """All layers of a model, none of its weights."""
    return spec_from_config(CONFIGS[name] | SMALL)


class Weights:
    """The first two layers' weights, in the place of all."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        two, others = replace(spec, layers=spec.layers[:2]), spec.num_layers - 1
        attention, ffn = random_attention_weights(two, SEED, device), random_ffn_weights(two, SEED, device)
        self.attention = replace(attention, layers=(attention.layers[0], *[attention.layers[1]] * others))
        self.ffn = (ffn[0], *[ffn[1]] * others)


@dataclass(frozen=True)
class Round:
    """What a rank took for each of some steps, and what the loop of Python took beside them."""

    used_us: list[float]
    beside_us: float
    is_asked: bool


class Bench:
    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self._report, self._has_devices, self._batch = report, not options.no_devices, 1
        self._num_rounds = options.rounds
        self._found: dict[str, list[Round]] = {}  # by metric
        self._kernels: tuple[Any, Any]
        if options.no_devices:
            from benchmarks.ranks.without_devices import NoKernels

            self._device, self._kernels = torch.device("cpu"), (NoKernels(), NoKernels())
            return
        from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
        from crosspool.backends.cuda.device.launch import DeviceKernels
        from crosspool.backends.cuda.device.queues import ask_for_queues

        ask_for_queues()
        self._device = torch.device("cuda", 0)
        whole = DeviceKernels(self._device)
        self._kernels = (MostOfAGpu(whole, whole.num_sms - options.server_sms), MostOfAGpu(whole, options.server_sms))

    def model(self, name: str, modes: list[Control], batch: int) -> None:
        self._batch = batch
        spec = full_spec(name) if self._has_devices else small_spec(name)
        weights, devices = Weights(spec, self._device), (self._device, self._device)
        for control in modes:
            make = torch.zeros if self._has_devices else torch.empty  # memory that nobody touches is not taken
            arena = make(batch * FRAMES_A_ROW, 2 * MiB, dtype=torch.uint8, device=self._device)
            with self._devices():
                ranks = DrivenRanks(
                    self._kernels,
                    devices,
                    spec,
                    weights.attention,
                    weights.ffn,
                    arena,
                    control,
                    num_lanes=1,
                    ahead=(),
                )
                self._measure(ranks, f"{name}.{control}" if batch == 1 else f"{name}.{control}.b{batch}")
            del ranks, arena
            gc.collect()

    @contextmanager
    def _devices(self) -> Iterator[None]:
        if self._has_devices:
            yield
            return
        from benchmarks.ranks.without_devices import no_devices

        with no_devices():
            yield

    def _measure(self, ranks: DrivenRanks, label: str) -> None:
        for _ in range(self._num_rounds):
            sequences, step_s = warmed_up(ranks, CONTEXT, WARM_UP, self._batch)
            for way, count in STEPS_A_ROUND.items():
                before_us = pace_us()
                found = self._used_us(ranks, sequences, way, step_s, count)
                beside_us = max(before_us, pace_us())
                for rank, used_us in found.items():
                    rounds = self._found.setdefault(f"host_us_per_step.{label}.{way}.{rank}", [])
                    rounds.append(Round(used_us, beside_us, is_asked=self._batch == 1))

    def tell(self) -> None:
        """Report what was measured, once all of it was."""
        paces_us = [each.beside_us for rounds in self._found.values() for each in rounds]
        quickest_us = min(paces_us)
        for name, rounds in self._found.items():
            used_us = [used for each in rounds for used in each.used_us]
            limit, note = (LIMIT_US, "of a core; asked") if rounds[0].is_asked else (None, "of a core")
            self._report.samples(name, used_us, limit=limit, note=note)
            first, third = np.percentile(used_us, (25, 75))
            self._report.metric(f"{name}.p25", float(first))
            self._report.metric(f"{name}.p75", float(third))
            quiet = [each for each in rounds if each.beside_us <= QUIET * quickest_us]
            self._report.metric(f"{name}.num_quiet_rounds", len(quiet))
            if quiet:
                quiet_us = float(np.median([used for each in quiet for used in each.used_us]))
                self._report.metric(f"{name}.quiet", quiet_us, limit=limit, note=f"median of {len(quiet)} quiet rounds")
        self._report.samples("python_loop_us", paces_us, limit=quickest_us, note="the machine's pace; at its quickest")

    def _used_us(
        self, ranks: DrivenRanks, sequences: Sequence[Sequence_], way: str, step_s: float, count: int
    ) -> dict[str, list[float]]:
        if self._has_devices or way == "steady":
            return host_us(ranks, sequences, 2 * step_s if way == "lone" else 0.0, count)
        found: dict[str, list[float]] = {rank: [] for rank in RANKS}
        others = bytearray(CACHE_BYTES)
        for _ in range(count):
            others[:] = bytes(CACHE_BYTES)
            for rank, used_us in host_us(ranks, sequences, 0.0, 1).items():
                found[rank] += used_us
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--modes", default="graphs,resident")
    parser.add_argument("--batches", default="1", help="rows of a step, of each in turn")
    parser.add_argument("--no-devices", action="store_true", help="hosts' Python alone, by graphs")
    parser.add_argument("--rounds", type=int, default=8, help="of steady and lone steps in turn")
    parser.add_argument("--server-sms", type=int, default=92, help="multiprocessors of the weights rank")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--hang-seconds", type=float, default=120.0, help="give up where nothing ends")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    config = {"context": CONTEXT, "batches": options.batches, "rounds": options.rounds, "steps": STEPS_A_ROUND}
    hardware = "cpu" if options.no_devices else "h200"
    report = Report("step_host", hardware=hardware, config=config, seed=SEED)
    on = "no device: Python alone" if options.no_devices else "both ranks on one GPU"
    report.summary = f"Processor time of each rank's thread for a decode step: descriptor, launch, tokens' read; {on}."
    bench = Bench(options, report)
    report.metric("timer_us", timer_us(), note="one look at a thread's time; two are in each figure")
    gc.disable()  # what frees device memory waits for the device, which may wait for this thread
    for name in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            bench.model(name, ["graphs"] if options.no_devices else options.modes.split(","), batch)
    bench.tell()
    report.write(options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
