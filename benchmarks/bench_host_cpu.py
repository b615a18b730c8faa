"""What do the hosts of two ranks take of a core while a lane decodes in runs that its devices take by themselves?

    python -m benchmarks.bench_host_cpu [--step-ms 2.5] [--steps 8] [--ways device] [--out DIRECTORY]

A device is a clock here: a run of steps has ended so far as time has passed since its records were written. Everything
else is real: loops of ranks and hosts in threads of their own, sockets, doorbells, records, commits. No GPU is needed,
and none of a driver's calls is in the figures. Times are those of the hosts' threads alone.
"""

from __future__ import annotations

import argparse
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, Report
from crosspool.backends.base import HalfStep, Inlet, LaneLinks, Outlet, Progress, Wait
from crosspool.backends.cuda.batch import Batch
from crosspool.backends.cuda.decode_run import places, push_run, read_end, read_run
from crosspool.backends.cuda.lane import LaneIdle
from crosspool.backends.cuda.lane_memory import DONE, LaneMemory, RunPlace, WaitRule
from crosspool.backends.cuda.link import OPEN_EPOCH
from crosspool.backends.numpy.sequences import Sequence
from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.control import ControlSocket
from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.host_loop import HostLoop
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_halves import header_of
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.cluster.rank_process import SocketInbox
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.core import SampledToken, SamplingParams
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow, epoch, run_over

LAYERS, PAGE_TOKENS, CONTEXT = 48, 256, 256
LANE_TOKENS_PER_S = 400
CORE_LIMIT = 5.0
SPIN_US = 200.0


class ClockedLane(LaneMemory):
    """A lane whose device ends a step every `step_s` seconds, as long as it has one."""

    def __init__(self, step_s: float) -> None:
        super().__init__(torch.device("cpu"), WaitRule())
        self._clocked_s = step_s
        self._ends: deque[tuple[float, int]] = deque()  # when, and the epoch
        self._until_s = 0.0

    def go(self, header: StepHeader) -> None:
        """A run is handed over; it begins at once, or behind the one that is under way."""
        self._until_s = max(self._until_s, time.monotonic())
        for base, _ in places(header, LAYERS):
            self._until_s += self._clocked_s
            self._ends.append((self._until_s, base + LAYERS))

    @property
    def done_epoch(self) -> int:
        now_s = time.monotonic()
        while self._ends and self._ends[0][0] <= now_s:
            self._host_words[DONE] = self._ends.popleft()[1]
        return int(self._host_words[DONE])


class ClockedInlet:
    """Arrived once the lane's device has come so far (as `DeviceInlet`)."""

    def __init__(self, lane: ClockedLane) -> None:
        self._lane = lane

    def arrived(self, epoch: int) -> bool:
        return epoch == OPEN_EPOCH or self._lane.done_epoch >= epoch

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")


class ClockedWorker:
    """Either half of a run, on a lane of its own."""

    def __init__(self, step_s: float) -> None:
        self.lane = ClockedLane(step_s)
        self.sequences: dict[int, Sequence] = {}
        self._ahead = 0  # the step that was found fit to be handed over while the one before is under way

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """As the CUDA workers, of a step that nothing makes wait but the one before."""
        if self.lane.nears_end:
            self._ahead = header_of(work).step_seq
        return self.lane.nears_end

    def takes_ahead(self, header: StepHeader) -> bool:
        return header.step_seq == self._ahead

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None: ...

    def remove_model(self, model: str) -> None: ...

    def forget(self, sequence_ids: Any) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]:
        return {}

    def open_link(
        self, lane: int, peer: str, region: memoryview, capacity: int, ring: Any, is_far: bool = False
    ) -> tuple[Outlet, Inlet]:
        return ClockedOutlet(), ClockedInlet(self.lane)

    def close_links(self, peer: str) -> None: ...


class ClockedOutlet:
    def put(self, layer: int, epoch: int, payload: Any) -> None:
        raise TypeError("kernels put rows, and there are none")


class ClockedAttention(ClockedWorker):
    batch: Batch | None = None

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        for new in step.joining:
            self.sequences[new.sequence_id] = Sequence(new, step.header.model, 1, 1000)
        is_ahead, inlet = self.takes_ahead(step.header), ClockedInlet(self.lane)
        batch = Batch(step, self.sequences, PAGE_TOKENS, self.batch if is_ahead else None)
        self.batch = batch
        if not is_ahead:
            yield Wait((LaneIdle(self.lane), inlet), OPEN_EPOCH)
        slots = push_run(self.lane, batch, step.header, LAYERS, 1, PAGE_TOKENS)
        self.lane.go(step.header)
        if is_ahead:
            yield Wait((), OPEN_EPOCH)
        sampled = yield from read_run(self.lane, batch, step, slots, LAYERS, (inlet,))  # type: ignore[arg-type]
        self.lane.nears_end = False
        return sampled


class ClockedFFN(ClockedWorker):
    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        is_ahead, inlet = self.takes_ahead(header), ClockedInlet(self.lane)
        if not is_ahead:
            yield Wait((LaneIdle(self.lane), inlet), OPEN_EPOCH)
        over = run_over(header.step_seq, header.num_steps, LAYERS)
        place = RunPlace(over, 0, header.num_steps - 1, may_be_first=is_ahead)
        self.lane.post(epoch(header.step_seq, 0) - 1, LAYERS, 1 << 40, place, header.num_steps)
        self.lane.go(header)
        if is_ahead:
            yield Wait((), OPEN_EPOCH)
        yield from read_end(self.lane, header, LAYERS, inlet)  # type: ignore[arg-type]
        self.lane.nears_end = False


class Hosted:
    """One rank's host in a thread, and the parent's end of its socket."""

    def __init__(self, number: int, name: str, worker: RankWorker, board: Board, bells: list[Doorbell]) -> None:
        ours, theirs = socket.socketpair()
        self._number, self._name, self._board, self._bell = number, name, board, bells[number]
        self.control: ControlSocket[FromRank, ToRank] = ControlSocket(ours)
        inbox = SocketInbox(ControlSocket(theirs))
        parent = len(bells) - 1
        inbox.watch(board, number, ringer(bells[parent], board, parent))
        around = RankSurroundings(
            emit=inbox.answer(name),
            ring=lambda peer: lambda: None,
            wake=self._bell.ring,
            clock=time.perf_counter,
            order=ORDER_POLICIES["priority"],
            step_deadline_s=5.0,
            start=lambda run, name: run(),
        )
        self._host = HostLoop([RankLoop(name, worker, around)], inbox, self._bell, board, number, SPIN_US)
        self._thread = threading.Thread(target=self._host.run)
        self._thread.start()

    def send(self, message: ToRank) -> None:
        self.control.queue((self._name, message))
        self._board.add_post(self._number)

    def cpu_s(self) -> float:
        """Processor time of its thread so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def end(self) -> None:
        self.send(messages.Stop())
        self._bell.ring()
        self._thread.join()


class Lane:
    """The engine's part: two descriptors of a lane in flight, and its tokens as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._board, self._bells = Board(ArrayRegion(Board.num_bytes(2))), [Doorbell.create() for _ in range(3)]
        step_s = options.step_ms / 1e3
        attention, ffn = ClockedAttention(step_s), ClockedFFN(step_s)
        is_ahead = options.steps_ahead == "device"
        workers = {
            "kv0": RankWorker(attention_worker=attention, links=attention, ahead=attention if is_ahead else None),
            "w0": RankWorker(ffn_worker=ffn, links=ffn, ahead=ffn if is_ahead else None),
        }
        self.hosts = {
            name: Hosted(number, name, worker, self._board, self._bells)
            for number, (name, worker) in enumerate(workers.items())
        }
        placement = ModelPlacement(
            name="m",
            directory=Path("."),
            hidden_size=64,
            kv_rank="kv0",
            weights_ranks=("w0",),
            page_tokens=PAGE_TOKENS,
            frame_bytes=1 << 21,
        )
        for host, peer in zip(self.hosts.values(), ("w0", "kv0"), strict=True):
            host.send(messages.OpenChannels(0, peer, 64, ArrayRegion(1 << 12)))
            host.send(messages.AddModel(placement, 1))
        self._seq, self._cached, self._flying = 0, CONTEXT, 0

    def _submit(self) -> None:
        self._seq += 1
        steps = self._options.steps
        header = StepHeader(lane=0, model="m", step_seq=self._seq, phase="decode", num_tokens=1, num_steps=steps)
        is_first = self._seq == 1
        pages = tuple((number + 1,) for number in range((CONTEXT + self._options.tokens + steps) // PAGE_TOKENS + 2))
        row = StepRow(
            sequence_id=1,
            token_ids=(5,) if is_first else None,
            num_cached_tokens=self._cached,
            num_new_tokens=1,
            new_pages=pages if is_first else (),
        )
        sampling = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        new = NewSequence(sequence_id=1, prompt_token_ids=(3,) * (CONTEXT + 1), output_token_ids=(), sampling=sampling)
        self._cached += steps
        behind = self._seq - 1 if self._flying else 0
        self.hosts["w0"].send(messages.Step(header, behind))
        step = StepDescriptor(header=header, rows=(row,), joining=(new,) if is_first else ())
        self.hosts["kv0"].send(messages.Step(step, behind))
        self._flying += 1

    def tokens(self) -> Iterator[int]:
        """How many tokens came with each message, to their number. Raises RuntimeError for a step that failed."""
        left = self._options.tokens // self._options.steps
        while self._flying or left:
            while self._flying < 2 and left:
                self._submit()
                left -= 1
            self._board.set_asleep(2, True)
            select.select([self._bells[2].read_fd], [], [], 0.05)
            self._board.set_asleep(2, False)
            self._bells[2].drain()
            for _, message in self.hosts["kv0"].control.receive():
                match message:
                    case messages.StepTold(_, _, steps):
                        yield len(steps)
                    case messages.StepFinished(_, told):
                        self._flying -= 1
                        yield 1 + len(told)
                    case messages.StepEnded(error=error):
                        raise RuntimeError(error)
                    case _:
                        pass


def measure(options: argparse.Namespace, report: Report) -> None:
    """Tokens after the first eighth are counted: by then the hosts have learned how long steps take."""
    way = options.steps_ahead
    lane, num_tokens, first, begin = Lane(options), 0, 0, (0.0, {"": 0.0})
    between_ms: list[float] = []
    now_s = time.perf_counter()
    for count in lane.tokens():
        num_tokens += count
        last_s, now_s = now_s, time.perf_counter()
        if not first and num_tokens >= options.tokens // 8:
            first, begin = num_tokens, (now_s, {name: host.cpu_s() for name, host in lane.hosts.items()})
        elif first:
            between_ms.append(1e3 * (now_s - last_s))
    wall_s, used = now_s - begin[0], {name: host.cpu_s() - begin[1][name] for name, host in lane.hosts.items()}
    for host in lane.hosts.values():
        host.end()
    counted = num_tokens - first
    for name, seconds in used.items():
        report.metric(f"host_us_per_token.{way}.{name}", 1e6 * seconds / counted)
    share = 100 * LANE_TOKENS_PER_S * sum(used.values()) / counted
    note = f"both ranks, at {LANE_TOKENS_PER_S} tokens/s"
    report.metric(f"host_core_percent.lane.{way}", share, limit=CORE_LIMIT, note=note)
    report.metric(f"ms_per_token.{way}", 1e3 * wall_s / counted, note=f"the device's alone: {options.step_ms:g}")
    report.samples(f"told_every_ms.{way}", between_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--step-ms", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--ways", default="host,device", help="where a lane's next run waits: --steps-ahead")
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    config = {"step_ms": options.step_ms, "steps_of_a_run": options.steps, "tokens": options.tokens, "batch": 1}
    report = Report("host_cpu", hardware="cpu", config=config, seed=0)
    report.summary = (
        "Processor time of two ranks' hosts while one lane decodes in runs, with a clock in place of the GPUs: no "
        "driver call is in it. Both hosts, and the thread in the engine's place, are in one process and share a lock."
    )
    for way in options.ways.split(","):
        measure(argparse.Namespace(**vars(options), steps_ahead=way), report)
    report.write(options.out)
    print(report.as_markdown(), flush=True)


if __name__ == "__main__":
    main()
