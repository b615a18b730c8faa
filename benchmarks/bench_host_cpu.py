"""What do the hosts of two ranks take of a core while a lane decodes in runs that its devices take by themselves?

    python -m benchmarks.bench_host_cpu [--step-ms 2.5] [--steps 8] [--ways device] [--out DIRECTORY]
    python -m benchmarks.bench_host_cpu --model deepseek-v2-lite --context 4096 --steps 21 --ways device

A device is a clock in the first form: a run of steps has ended so far as time has passed since its records were
written. Everything else is real: loops of ranks, hosts in threads of their own, sockets, doorbells, records, commits.
No GPU is needed, and none of a driver's calls is in the figures. In the second both ranks have a part of one GPU. Times
are those of the hosts' threads alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import select
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.python_pace import loop_us
from benchmarks.ranks.clocked import clocked_ranks
from benchmarks.ranks.hosted import Hosted
from benchmarks.report import RESULTS, Report
from crosspool.cluster import messages
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.region import ArrayRegion
from crosspool.core import SamplingParams
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow

LANE_TOKENS_PER_S = 400
CORE_LIMIT = 5.0
PARTS = 8


class Lane:
    """The engine's part: two descriptors of a lane in flight, and its tokens as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._board, self._bells = Board(ArrayRegion(Board.num_bytes(2))), [Doorbell.create() for _ in range(3)]
        is_ahead, num_tokens = options.steps_ahead == "device", options.context + options.tokens + options.steps
        if options.model:
            from benchmarks.ranks.hosted_on_gpu import ranks_on_one_gpu

            ranks = ranks_on_one_gpu(options.model, options.server_sms, num_tokens, is_ahead=is_ahead)
        else:
            ranks = clocked_ranks(options.step_ms / 1e3, num_tokens, is_ahead=is_ahead)
        self._pages = ranks.pages
        self.hosts = {
            name: Hosted(number, name, worker, self._board, self._bells)
            for number, (name, worker) in enumerate(ranks.workers.items())
        }
        for host, peer in zip(self.hosts.values(), ("w0", "kv0"), strict=True):
            host.send(messages.OpenChannels(0, peer, ranks.capacity, ranks.region))
        for host in self.hosts.values():  # one after another: nothing is captured while the other one loads
            host.send(messages.AddModel(ranks.placement, 1))
            while not any(isinstance(message, messages.Loaded) for message in self._said_by(host)):
                time.sleep(0.01)
        self._seq, self._cached, self._flying = 0, options.context, 0
        self._num_runs = options.tokens // options.steps
        self.num_tokens = 1 + (self._num_runs - 1) * options.steps

    def _submit(self) -> None:
        self._seq += 1
        is_first = self._seq == 1  # the last token of its prompt
        steps = 1 if is_first else self._options.steps
        header = StepHeader(
            lane=0,
            model="m",
            step_seq=self._seq,
            phase="prefill" if is_first else "decode",
            num_tokens=1,
            num_steps=steps,
        )
        row = StepRow(
            sequence_id=1,
            token_ids=(5,) if is_first else None,
            num_cached_tokens=self._cached,
            num_new_tokens=1,
            new_pages=self._pages if is_first else (),
        )
        sampling = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        new = NewSequence(
            sequence_id=1, prompt_token_ids=(3,) * (self._options.context + 1), output_token_ids=(), sampling=sampling
        )
        self._cached += steps
        behind = self._seq - 1 if self._flying else 0
        self.hosts["w0"].send(messages.Step(header, behind))
        step = StepDescriptor(header=header, rows=(row,), joining=(new,) if is_first else ())
        self.hosts["kv0"].send(messages.Step(step, behind))
        self._flying += 1

    def tokens(self) -> Iterator[int]:
        """How many tokens came with each message, to their number. Raises RuntimeError for a step that failed."""
        left = self._num_runs
        while self._flying or left:
            while self._flying < 2 and left:
                self._submit()
                left -= 1
            self._board.set_asleep(2, True)
            select.select([self._bells[2].read_fd], [], [], 0.05)
            self._board.set_asleep(2, False)
            self._bells[2].drain()
            list(self._said_by(self.hosts["w0"]))
            for message in self._said_by(self.hosts["kv0"]):
                match message:
                    case messages.StepTold(_, _, steps):
                        yield len(steps)
                    case messages.StepFinished(_, told):
                        self._flying -= 1
                        yield 1 + len(told)
                    case _:
                        pass

    def _said_by(self, host: Hosted) -> Iterator[messages.FromRank]:
        """What has come from it. Raises RuntimeError for a load or a step that failed."""
        for _, message in host.control.receive():
            if isinstance(message, messages.StepEnded | messages.LoadFailed):
                raise RuntimeError(message.error)
            yield message


@dataclass(frozen=True)
class Look:
    """How far the lane was at a moment, and what each host had taken of a core by then."""

    num_tokens: int
    wall_s: float
    used_s: dict[str, float]

    def core_percent(self, until: Look, names: Iterable[str]) -> float:
        """What these hosts took of a core between two looks, at the rate that is asked for."""
        used_s = sum(until.used_s[name] - self.used_s[name] for name in names)
        return 100 * LANE_TOKENS_PER_S * used_s / (until.num_tokens - self.num_tokens)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Tokens after the first eighth are counted: by then the hosts have learned how long steps take.

    A machine's cores may be shared, so what the quickest of the parts took stands beside the whole.
    """
    way = options.steps_ahead
    paces_us = [loop_us() for _ in range(20)]
    lane, num_tokens, looks = Lane(options), 0, list[Look]()
    between_ms: list[float] = []
    now_s = time.perf_counter()
    for count in lane.tokens():
        num_tokens += count
        last_s, now_s = now_s, time.perf_counter()
        if looks:
            between_ms.append(1e3 * (now_s - last_s))
        if num_tokens >= lane.num_tokens * (len(looks) + 1) // PARTS:
            looks.append(Look(num_tokens, now_s, {name: host.cpu_s() for name, host in lane.hosts.items()}))
    for host in lane.hosts.values():
        host.end()
    first, last = looks[0], looks[-1]
    counted, at = last.num_tokens - first.num_tokens, f"at {LANE_TOKENS_PER_S} tokens/s"
    for name, used_s in last.used_s.items():
        report.metric(f"host_us_per_token.{way}.{name}", 1e6 * (used_s - first.used_s[name]) / counted)
        report.metric(f"host_core_percent.{way}.{name}", first.core_percent(last, [name]), note=at)
    share = first.core_percent(last, lane.hosts)
    report.metric(f"host_core_percent.lane.{way}", share, limit=CORE_LIMIT, note=f"both ranks, {at}")
    parts = [before.core_percent(after, lane.hosts) for before, after in pairwise(looks)]
    report.samples(f"host_core_percent.parts.{way}", parts, note="both ranks, in parts of the time")
    report.metric(f"host_core_percent.best_part.{way}", min(parts), limit=CORE_LIMIT, note="the quickest of them")
    report.metric(
        f"ms_per_token.{way}",
        1e3 * (last.wall_s - first.wall_s) / counted,
        note="" if options.model else f"the device's alone: {options.step_ms:g}",
    )
    report.samples(f"told_every_ms.{way}", between_ms)
    report.samples(f"python_loop_us.{way}", paces_us, note="the same work always: the machine's pace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step-ms", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--ways", default="host,device", help="where a lane's next run waits: --steps-ahead")
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--model", default="", help="on one GPU, in place of a clock: a name of `full_models`")
    parser.add_argument("--server-sms", type=int, default=92, help="multiprocessors of the server beside attention")
    parser.add_argument("--name", default="host_cpu", help="of the result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--hang-seconds", type=float, default=120.0, help="give up where nothing ends")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    config = {"steps_of_a_run": options.steps, "tokens": options.tokens, "batch": 1, "context": options.context}
    config |= (
        {"model": options.model, "server_sms": options.server_sms} if options.model else {"step_ms": options.step_ms}
    )
    report = Report(options.name, hardware="h200" if options.model else "cpu", config=config, seed=0)
    on = f"{options.model} on one GPU, driver calls included" if options.model else "a clock in place of the GPUs"
    report.summary = (
        f"Processor time of two ranks' hosts while one lane decodes in runs: {on}. Both hosts, and the thread in the "
        "engine's place, are in one process and share a lock."
    )
    for way in options.ways.split(","):
        measure(argparse.Namespace(**vars(options), steps_ahead=way), report)
    report.write(options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
