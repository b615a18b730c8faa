"""A small engine for tests of a cluster: each lane generates for a batch of sequences and replays what fails."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crosspool.cluster.base import (
    Cluster,
    Event,
    ModelFailed,
    ModelReady,
    RankFailed,
    RankLost,
    RankReady,
    StepDone,
    StepFailed,
)
from crosspool.core import SamplingParams
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepResult, StepRow
from tests.support.awaited import PATIENCE_S

_sequence_ids = itertools.count(1)


@dataclass
class Sequence_:
    """One sequence: what it was asked, what it has."""

    prompt: tuple[int, ...]
    num_tokens: int
    outputs: list[int] = field(default_factory=list)
    sequence_id: int = field(default_factory=lambda: next(_sequence_ids))
    num_cached: int = 0  # 0: the KV rank does not know it

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.num_tokens


@dataclass
class LaneDriver:
    """One lane. `next_step` gives its next step; `done` and `failed` tell how it went. A batch decodes in step.

    is_ahead: the step after the one in flight is handed out behind it.
    """

    lane: int
    model: str
    sequences: Sequence[Sequence_]
    kv_rank: str = "kv0"
    weights_ranks: Sequence[str] | None = None  # those its model needs; None: all
    priority: int = 0
    step_seq: int = 0
    num_replays: int = 0
    is_ahead: bool = False
    in_flight: list[int] = field(default_factory=list)  # step numbers
    is_failing: bool = False  # what is in flight will fail: nothing goes behind it

    @property
    def is_done(self) -> bool:
        return all(sequence.is_done for sequence in self.sequences)

    def next_step(self) -> StepDescriptor:
        live = [sequence for sequence in self.sequences if not sequence.is_done]
        joining = [sequence for sequence in live if sequence.num_cached == 0]
        return self._step(joining, [self._prefill_row(s) for s in joining] or [self._decode_row(s) for s in live])

    def step_behind(self) -> StepDescriptor | None:
        """The step after the only one in flight, if that leaves anything to do and has all sequences in it."""
        if not self.is_ahead or len(self.in_flight) != 1:
            return None
        live = [sequence for sequence in self.sequences if not sequence.is_done]
        if len({sequence.num_cached == 0 for sequence in live}) != 1:
            return None
        going_on = [sequence for sequence in live if len(sequence.outputs) + 1 < sequence.num_tokens]
        if not going_on:
            return None
        rows = [self._decode_row(s)._replace(num_cached_tokens=len(s.prompt) + len(s.outputs)) for s in going_on]
        return self._step([], rows)

    def _step(self, joining: Sequence[Sequence_], rows: Sequence[StepRow]) -> StepDescriptor:
        self.step_seq += 1
        self.in_flight.append(self.step_seq)
        header = StepHeader(
            lane=self.lane,
            model=self.model,
            step_seq=self.step_seq,
            phase="prefill" if joining else "decode",
            num_tokens=sum(row.num_new_tokens for row in rows),
            priority=self.priority,
            kv_rank=self.kv_rank,
        )
        news = [
            NewSequence(
                sequence_id=sequence.sequence_id,
                prompt_token_ids=sequence.prompt,
                output_token_ids=tuple(sequence.outputs),
                sampling=SamplingParams(max_tokens=sequence.num_tokens, temperature=0.0),
            )
            for sequence in joining
        ]
        return StepDescriptor(header=header, rows=tuple(rows), joining=tuple(news))

    def done(self, result: StepResult) -> None:
        assert result.step_seq == self.in_flight[0], f"lane {self.lane} got step {result.step_seq}, not its first"
        self.in_flight.remove(result.step_seq)
        by_id = {sequence.sequence_id: sequence for sequence in self.sequences}
        for token in result.sampled:
            sequence = by_id[token.sequence_id]
            sequence.num_cached = len(sequence.prompt) + len(sequence.outputs)
            sequence.outputs.append(token.token_id)

    def failed(self, step_seq: int) -> None:
        self.in_flight.remove(step_seq)
        self.is_failing = bool(self.in_flight)
        self.num_replays += 1

    def kv_lost(self) -> None:
        """What the KV rank knew is gone."""
        for sequence in self.sequences:
            sequence.num_cached = 0

    def _prefill_row(self, sequence: Sequence_) -> StepRow:
        tokens = (*sequence.prompt, *sequence.outputs)
        return StepRow(
            sequence_id=sequence.sequence_id, token_ids=tokens, num_cached_tokens=0, num_new_tokens=len(tokens)
        )

    def _decode_row(self, sequence: Sequence_) -> StepRow:
        return StepRow(
            sequence_id=sequence.sequence_id,
            token_ids=None,
            num_cached_tokens=sequence.num_cached,
            num_new_tokens=1,
        )


class Run:
    """Drives lanes over a cluster until all are done; keeps every event."""

    def __init__(self, cluster: Cluster, lanes: Sequence[LaneDriver]) -> None:
        self.cluster = cluster
        self.lanes = {lane.lane: lane for lane in lanes}
        self.events: list[Event] = []
        self.away: set[str] = set()
        self.to_submit = {lane.lane for lane in lanes}
        self.num_in_flight = 0
        self.num_behind = 0

    def turn(self, timeout_s: float = 1.0) -> None:
        """Submit what can be submitted, then take the events of one poll."""
        for number in sorted(self.to_submit):
            if not self.waits_for_rank(self.lanes[number]):
                self.cluster.submit(self.lanes[number].next_step())
                self.num_in_flight += 1
                self.to_submit.discard(number)
        for lane in self.lanes.values():
            if not self.waits_for_rank(lane) and not lane.is_failing and (step := lane.step_behind()) is not None:
                self.cluster.submit(step)
                self.num_in_flight += 1
                self.num_behind += 1
        for event in self.cluster.poll(timeout_s):
            self.events.append(event)
            self._take(event)

    def waits_for_rank(self, lane: LaneDriver) -> bool:
        needed = self.away if lane.weights_ranks is None else {lane.kv_rank, *lane.weights_ranks}
        return not self.away.isdisjoint(needed)

    def to_end(self, limit_s: float = 60.0, between: Callable[[], None] = lambda: None) -> None:
        until_s = time.monotonic() + limit_s
        while not all(lane.is_done for lane in self.lanes.values()):
            assert time.monotonic() < until_s, f"lanes do not end: {self.lanes}, last events {self.events[-5:]}"
            between()
            self.turn()

    def _take(self, event: Event) -> None:
        match event:
            case StepDone(result=result):
                lane = self.lanes[result.lane]
                lane.done(result)
                self.num_in_flight -= 1
                if not lane.is_done and not lane.in_flight:
                    self.to_submit.add(lane.lane)
            case StepFailed(fatal=fatal, error=error):
                assert not fatal, error
                self.num_in_flight -= 1
                lane = self.lanes[event.lane]
                lane.failed(event.step_seq)
                if not lane.in_flight:
                    self.to_submit.add(lane.lane)
            case RankLost(rank=rank):
                self.away.add(rank)
                for lane in self.lanes.values():
                    if lane.kv_rank == rank:
                        lane.kv_lost()
                        lane.is_failing = bool(lane.in_flight)
            case RankReady(rank=rank):
                self.away.discard(rank)
            case ModelFailed(error=error) | RankFailed(error=error):
                raise AssertionError(error)


def wait_for(
    cluster: Cluster, kind: type, num_events: int = 1, limit_s: float = PATIENCE_S, seen: list[Event] | None = None
) -> list[Event]:
    """The first `num_events` events of a kind; all that came meanwhile are added to `seen`."""
    found: list[Event] = []
    until_s = time.monotonic() + limit_s
    while len(found) < num_events:
        assert time.monotonic() < until_s, f"no {kind.__name__} within {limit_s} s"
        for event in cluster.poll(0.2):
            if seen is not None:
                seen.append(event)
            if isinstance(event, kind):
                found.append(event)
            elif isinstance(event, ModelFailed | RankFailed) and kind in (ModelReady, RankReady):
                raise AssertionError(event.error)
    return found
