"""Dispatcher: fills lanes with replays of parked steps, decode batches and prefill chunks.

A lane's next decode step is handed out while its present one runs (`fill_ahead`), so that ranks need not wait for the
engine between two steps. It holds a row for each sequence that is sure to go on unless its very next token ends it.
"""

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from crosspool.engine.batcher import Chunk, Turns, decode_row, make_step, prefill_chunks, prefill_row
from crosspool.engine.config import EngineConfig
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Flight, Lane, ParkedStep, Trouble, rows_of
from crosspool.engine.model_load import ModelLoad
from crosspool.engine.prefill_ranks import PrefillRanks, with_bounded_past
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.engine.shared_prefill import shared_chunks
from crosspool.scheduler.step import LAYERS_PER_STEP, MAX_RUN_ROWS, NewSequence, Phase, StepDescriptor, StepRow


class Dispatcher:
    """The lanes and parked steps. Reads the core's models, pages and ranks; changes only sequences' rows and pages."""

    def __init__(
        self,
        config: EngineConfig,
        loads: Mapping[str, ModelLoad],
        kv: KVPages,
        ranks: RankHealth,
    ) -> None:
        self.lanes = [
            Lane(index, "decode" if index < config.num_decode_lanes else "prefill") for index in range(config.num_lanes)
        ]
        self.parked: list[ParkedStep] = []
        self.num_replays = 0
        self.num_stalls = 0
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._longest_run = config.decode_steps
        self.prefill_ranks = PrefillRanks(config.prefill_ranks, ranks)
        self._num_decode_lanes = config.num_decode_lanes
        self._loads = loads
        self._kv = kv
        self._ranks = ranks
        self._turns: dict[Phase, Turns] = {"decode": Turns(), "prefill": Turns()}

    def add_model(self, name: str) -> None:
        for turns in self._turns.values():
            turns.add(name)

    def remove_model(self, name: str) -> None:
        for turns in self._turns.values():
            turns.remove(name)
        self.prefill_ranks.remove_model(name)

    def take_turn(self, name: str, phase: Phase) -> None:
        """The model has got a lane of the phase: its next turn comes after everyone else's."""
        self._turns[phase].take(name)

    def fill(self, now: float) -> list[StepDescriptor]:
        """A step for every idle lane that has work; replays come first."""
        steps = [step for parked in list(self.parked) if (step := self._replay(parked, now)) is not None]
        for lane in self.lanes:
            if lane.step is None:
                step = self._decode_step(lane, now) if lane.phase == "decode" else self._prefill_step(lane, now)
                if step is not None:
                    steps.append(step)
        return steps

    def fill_ahead(self, now: float) -> list[StepDescriptor]:
        """A step behind each running decode step that has none yet.

        Up to as many models as lanes keep their lanes; of more, the one whose turn is next goes behind the step that
        runs longest. Parked steps come first: while there are any, lanes run empty.
        """
        if self.parked:
            return []
        decode = [lane for lane in self.lanes if lane.phase == "decode"]
        open_ = [
            (lane.present.started_s, lane)
            for lane in decode
            if lane.present is not None and lane.queued is None and not lane.present.is_abandoned
        ]
        if not open_:
            return []
        loads = [load for load in self._loads.values() if load.decoding]
        num_batches = sum(len(self._homes(load, load.decoding.values())) for load in loads)
        next_step = self._same_again if num_batches <= len(decode) else self._next_turn
        steps = (next_step(lane, now) for _, lane in sorted(open_, key=lambda entry: entry[0]))
        return [step for step in steps if step is not None]

    def ended(self, lane: int, step_seq: int, now: float) -> Flight | None:
        """Take the lane's running step out if it has that number; the step behind it runs now.

        None if nobody waits for the step: its number is another one's, or its sequences have left.
        """
        found = self.lanes[lane].present
        if found is None or found.step.header.step_seq != step_seq:
            return None
        self.lanes[lane].finish(now)
        return None if found.is_abandoned else found

    def told(self, lane: int, step_seq: int) -> Flight | None:
        """The lane's running step, if it has that number, and a step of its run has ended. None as in `ended`."""
        found = self.lanes[lane].present
        if found is None or found.step.header.step_seq != step_seq or found.is_abandoned:
            return None
        found.tell()
        return found

    def failed(self, lane: int, step_seq: int, now: float) -> tuple[Flight | None, tuple[Sequence, ...]]:
        """`ended` for a step that failed, and the sequences of the step behind it, which does not run either.

        Where the step behind the running one fails by itself it is simply taken back.
        """
        found = self.lanes[lane]
        if found.queued is not None and found.queued.step.header.step_seq == step_seq:
            return None, found.withdraw()
        is_present = found.present is not None and found.present.step.header.step_seq == step_seq
        flight = self.ended(lane, step_seq, now)
        return flight, found.cancel() if is_present else ()

    def park(self, step: StepDescriptor, sequences: tuple[Sequence, ...], trouble: Trouble, now: float) -> None:
        """Keep a failed step, without the rows of sequences that have ended, until it can be replayed."""
        alive = [sequence for sequence in sequences if sequence.state is not SequenceState.ENDED]
        not_before_s = now + trouble.backoff_s() if self._ranks.are_up(self._ranks_of(step)) else now
        self._park(step, sequences, alive, trouble, not_before_s)

    def isolate(self, step: StepDescriptor, sequences: tuple[Sequence, ...], trouble: Trouble, now: float) -> None:
        """Replay a step in which a worker raised row by row, so that only the row that made it raise fails again."""
        for sequence in sequences:
            if sequence.state is not SequenceState.ENDED:
                self._park(step, sequences, [sequence], replace(trouble), now)

    def _park(
        self,
        step: StepDescriptor,
        sequences: tuple[Sequence, ...],
        kept: Items[Sequence],
        trouble: Trouble,
        not_before_s: float,
    ) -> None:
        part, members = rows_of(step, sequences, kept)
        part = replace(part, header=replace(part.header, prefill_rank=None))  # the pools can do it as well
        self.parked.append(ParkedStep(part, members, self._ranks_of(step), trouble, not_before_s))
        for sequence in members:
            sequence.take_step(part.num_steps)

    def _ranks_of(self, step: StepDescriptor) -> frozenset[str]:
        return frozenset(self._loads[step.header.model].needs[step.header.kv_rank])

    def _homes(self, load: ModelLoad, sequences: Iterable[Sequence]) -> list[str]:
        """Homes of `sequences` whose steps can run: the model has a batch for each."""
        homes = load.homes_up(self._ranks)
        taken = {sequence.kv_rank for sequence in sequences} if homes else ()
        return [home for home in homes if home in taken]

    def drop_parked_row(self, sequence: Sequence) -> None:
        """Leave an ended sequence out of the parked step that has a row of it, if one has."""
        for parked in self.parked:
            if sequence in parked.sequences:
                parked.drop(sequence)
        self.parked = [parked for parked in self.parked if parked.sequences]

    def kv_rank_lost(self, kv_rank: str) -> None:
        """The rank's sequences leave their steps."""
        for flight in self._flights():
            if kv_rank in self._ranks_of(flight.step):
                flight.abandon()
        self.parked = [parked for parked in self.parked if kv_rank not in parked.ranks]

    def _replay(self, parked: ParkedStep, now: float) -> StepDescriptor | None:
        phase = parked.step.header.phase
        idle = [lane for lane in self.lanes if lane.phase == phase and lane.step is None]
        if not idle or not parked.is_ready(self._ranks.down_since_s, now):
            return None
        own = [lane for lane in idle if lane.index == parked.step.header.lane]
        self.parked.remove(parked)
        self.num_replays += 1
        return parked.replay_in((own or idle)[0], now)

    def _decode_step(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The next model's whole decode batch: all its decoding sequences that have a slot for one more token."""
        flying = self._decode_steps()
        for name in self._turns["decode"].ready(self._decoding(flying)):
            load = self._loads[name]
            for home in self._homes(load, load.decoding.values()):
                step = None if (name, home) in flying else self._decode_batch(lane, load, home, now)
                if step is not None:
                    return step
        return None

    def _decoding(self, flying: Container[tuple[str, str]]) -> set[str]:
        """Models with decoding sequences that may be in no step yet."""
        return {
            name
            for name, load in self._loads.items()
            if load.decoding and any((name, home) not in flying for home in load.needs)
        }

    def _decode_batch(self, lane: Lane, load: ModelLoad, home: str, now: float) -> StepDescriptor | None:
        decoding = [sequence for sequence in load.decoding.values() if sequence.kv_rank == home]
        batch = [sequence for sequence in decoding if self._kv.of(sequence).ensure_slot(sequence)]
        self.num_stalls += len(decoding) - len(batch)
        if not batch:
            return None
        num_steps = self._num_steps(load, batch)
        return self._start(lane, load, home, batch, [decode_row(sequence) for sequence in batch], now, num_steps)

    def _same_again(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The decode step after the running one of the same model: one token further for every sequence in that.

        None where the next row of a sequence cannot be known yet (its grammar has to see the token first), and where a
        sequence would have to wait for a page.
        """
        assert lane.step is not None
        name, home = lane.step.header.model, lane.step.header.kv_rank
        load = self._loads.get(name)
        if load is None or not self._ranks.are_up(load.needs[home]) or self._decode_steps().count((name, home)) != 1:
            return None
        batch = []
        for sequence in load.decoding.values():
            if sequence.kv_rank != home:
                continue
            if sequence.in_step:
                if sequence.request.constraint is not None:
                    return None
                if sequence.num_generated_tokens + sequence.num_ahead >= sequence.request.sampling.max_tokens:
                    continue  # the running step gives its last token
            if not self._kv.of(sequence).ensure_slot_ahead(sequence):
                return None
            batch.append(sequence)
        if not batch:
            return None
        num_steps = self._num_steps(load, batch)
        rows = [decode_row(sequence, sequence.num_ahead) for sequence in batch]
        return self._start(lane, load, home, batch, rows, now, num_steps)

    def _num_steps(self, load: ModelLoad, batch: Items[Sequence]) -> int:
        """How many steps the batch may take by itself: one, unless nobody would wait longer for that.

        None of its sequences reaches `max_tokens` or lacks a page within them, and none ends in a way that only the
        engine sees. Others of the model that wait to join, and other models that wait for a lane, come in after each
        step.
        """
        most = min(self._longest_run, (LAYERS_PER_STEP - 1) // load.model.spec.num_layers)
        if most == 1 or len(batch) > MAX_RUN_ROWS or load.model.kv_split != "one":
            return 1
        loads = [other for other in self._loads.values() if other.decoding]
        num_batches = sum(len(self._homes(other, other.decoding.values())) for other in loads)
        waiting = load.prefilling or not load.queue.is_empty or self._kv.has_stalled
        if waiting or num_batches > self._num_decode_lanes:
            return 1
        for sequence in batch:
            request = sequence.request
            if request.constraint is not None or request.has_stop_strings:
                return 1
            most = min(most, request.sampling.max_tokens - sequence.num_generated_tokens - sequence.num_ahead)
        has_pages = all(self._kv.of(sequence).ensure_slot_ahead(sequence, most) for sequence in batch)
        return max(1, most) if has_pages else 1

    def _next_turn(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The decode step of the model whose turn comes next, behind another model's step.

        Steps behind one another have the same KV rank, which alone tells in which order they end; where the next model
        has another one the lane is left to become idle, so that it takes it.
        """
        assert lane.step is not None
        flying = self._decode_steps()
        for name in self._turns["decode"].ready(self._decoding(flying)):
            load, home = self._loads[name], lane.step.header.kv_rank
            homes = [own for own in self._homes(load, load.decoding.values()) if (name, own) not in flying]
            if not homes:
                continue
            if home not in homes:
                return None
            step = self._decode_batch(lane, load, home, now)
            if step is not None:
                return step
        return None

    def _prefill_step(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The next model's chunk, shared by its prefilling sequences: on the lane's prefill rank, or in the pools."""
        names = {name for name, load in self._loads.items() if load.prefilling}
        if not names:
            return None
        rank = self.prefill_ranks.of_lane(lane.index - self._num_decode_lanes)
        turns = self._turns["prefill"].ready(names)
        if rank is not None:
            own = [self._loads[name] for name in turns if self.prefill_ranks.computes(rank, self._loads[name])]
            for name in self.prefill_ranks.order(rank, own, now):
                step = self._prefill_of(lane, self._loads[name], now, rank)
                if step is not None:
                    self.prefill_ranks.take(rank, name)
                    return step
            turns = [name for name in turns if self._loads[name] not in own]
        for name in turns:
            step = self._prefill_of(lane, self._loads[name], now)
            if step is not None:
                return step
        return None

    def _prefill_of(
        self, lane: Lane, load: ModelLoad, now: float, prefill_rank: str | None = None
    ) -> StepDescriptor | None:
        waiting = [sequence for sequence in load.prefilling.values() if not sequence.in_step]
        homes = self._homes(load, waiting)
        if prefill_rank is not None:  # no weights rank has a part in it
            homes = [home for home in load.needs if self._ranks.are_up((home,))]
        for home in homes:
            chunks = self._chunks(load, home, [sequence for sequence in waiting if sequence.kv_rank == home])
            if prefill_rank is not None:
                chunks = with_bounded_past(chunks, load.model.model_limit)
            if chunks:
                batch, rows = [chunk.sequence for chunk in chunks], [prefill_row(chunk) for chunk in chunks]
                return self._start(lane, load, home, batch, rows, now, prefill_rank=prefill_rank)
        return None

    def _chunks(self, load: ModelLoad, home: str, waiting: Items[Sequence]) -> list[Chunk]:
        """What the model's next prefill step with this home runs."""
        prefix = self._kv.prefix(load.model.name, home)
        if prefix is None:
            return prefill_chunks(waiting, self._max_num_batched_tokens)
        running = [
            Chunk(sequence, row.num_new_tokens)
            for lane in self.lanes
            if lane.phase == "prefill" and lane.step is not None and lane.step.header.model == load.model.name
            for row, sequence in zip(lane.step.rows, lane.sequences, strict=False)
            if sequence.kv_rank == home
        ]
        return shared_chunks(prefix, waiting, running, self._max_num_batched_tokens)

    def _start(
        self,
        lane: Lane,
        load: ModelLoad,
        home: str,
        batch: Items[Sequence],
        rows: Items[StepRow],
        now: float,
        num_steps: int = 1,
        prefill_rank: str | None = None,
    ) -> StepDescriptor:
        self.take_turn(load.model.name, lane.phase)
        joining: list[NewSequence] = []
        for sequence in batch:
            if not sequence.joined:
                self._kv.of(sequence).started(sequence)
                sequence.joined = True
                joining.append(sequence.introduction())
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
        step = make_step(
            lane=lane.index,
            step_seq=lane.next_seq(),
            model=load.model.name,
            kv_rank=home,
            phase=lane.phase,
            rows=rows,
            joining=joining,
            num_steps=num_steps,
            prefill_rank=prefill_rank,
        )
        lane.start(step, tuple(batch), now)
        return step

    def _flights(self) -> list[Flight]:
        return [flight for lane in self.lanes for flight in lane.flights()]

    def _decode_steps(self) -> list[tuple[str, str]]:
        """Model and home of every decode step in flight or parked: decode requests that share both share one lane."""
        steps = [flight.step for lane in self.lanes if lane.phase == "decode" for flight in lane.flights()]
        steps += [parked.step for parked in self.parked if parked.step.header.phase == "decode"]
        return [(step.header.model, step.header.kv_rank) for step in steps]
