"""A cluster without workers, threads or clock: it checks every step it gets and answers from a random generator.

Tokens are a pure function of (seed, position), so that a replayed or a second time prefilled sequence must give the
very same ones. Every rule of the contract between engine and workers is asserted where it could be broken.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crosspool.cluster.base import Event, RankLost, RankReady, StepDone, StepFailed, StepTokens
from crosspool.core import SampledToken
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepResult, StepRow
from tests.support.frame_contents import FrameContents, Marks

VOCAB_SIZE = 64
ALL_RANKS = "all KV ranks"
"""Stands for the rank of frames that are numbered over all of them."""


def token_at(seed: int, position: int) -> int:
    """The token a sequence has at `position`: all that decides it is its seed."""
    return random.Random(seed * 1_000_003 + position).randrange(VOCAB_SIZE)


def expected_tokens(seed: int, num_prompt_tokens: int, max_tokens: int, stops: Sequence[int], min_tokens: int = 0):
    """What an undisturbed run generates."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, num_prompt_tokens + len(tokens)))
        if len(tokens) >= min_tokens and tokens[-1] in stops:
            break
    return tokens


@dataclass
class _Known:
    """A sequence as its KV worker knows it."""

    new: NewSequence
    pages: list[tuple[int, ...]] = field(default_factory=list)
    num_pages: int = 0  # those of steps that ended well
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    marks: Marks = field(default_factory=lambda: Marks(""))

    def marks_to(self, stop: int) -> list[int]:
        """Marks of its slots up to `stop`."""
        told = (*self.new.prompt_token_ids, *self.new.output_token_ids)
        for position in range(len(self.marks.marks), stop):
            sampled = token_at(self.new.sampling.seed, position)
            self.marks.extend([told[position] if position < len(told) else sampled])
        return self.marks.marks


class SimulatedCluster:
    """Time is an argument; `due(now)` gives the events up to `now`, in order.

    kv_ranks: those whose frames are numbered one after another, where there are several.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        num_frames: int,
        seed: int,
        fail_rate: float = 0.0,
        kv_ranks: Sequence[str] = (),
    ) -> None:
        self.kv_ranks = tuple(kv_ranks)
        self.models = {model.name: model for model in models}
        self.num_frames = num_frames
        self.fail_rate = fail_rate
        self.rng = random.Random(seed)
        self.down: set[str] = set()
        self.running: dict[int, StepDescriptor] = {}
        self.told: dict[int, int] = {}  # by lane: steps of the running one's run that have been told
        self.behind: dict[int, StepDescriptor] = {}  # handed out behind the running one of the lane
        self.dead: set[int] = set()  # lanes whose step's KV rank was lost: its end is still to be told
        self.dead_behind: set[int] = set()  # the same of the step behind, where that alone needs the rank
        self.known: dict[str, dict[int, _Known]] = {}
        self.last_seq: dict[int, int] = {}
        self.steps: list[StepDescriptor] = []
        self.poison: dict[int, str] = {}  # sequences whose rows make the worker raise, by phase
        self.durations: dict[str, float] = {}  # by model; random where a model has none
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0
        self.num_copies = 0
        self._contents = FrameContents()

    def submit(self, step: StepDescriptor, now: float) -> None:
        header = step.header
        assert header.step_seq > self.last_seq.get(header.lane, 0), "a step number was used again"
        self.last_seq[header.lane] = header.step_seq
        self._check(step)
        self.steps.append(step)
        running = self.running.get(header.lane)
        if running is None:
            self.running[header.lane] = step
            self._begin(step, now)
            return
        assert header.lane not in self.behind, f"lane {header.lane} got a third step"
        assert running.header.kv_rank == header.kv_rank, "steps of two KV ranks have no order in one lane"
        assert header.lane not in self.dead, "a step behind one that nobody waits for"
        self.behind[header.lane] = step
        if any(rank in self.down for rank in self._needs(step)):  # as if it were handed out alone
            self._after(0.0, now, _failed(step, (), "a rank is away"))

    def _needs(self, step: StepDescriptor) -> tuple[str, ...]:
        header = step.header
        return self.models[header.model].placement.step_ranks(header.kv_rank, header.prefill_rank)

    def _begin(self, step: StepDescriptor, now: float) -> None:
        """Decide how the step will end, and when."""
        header, needs = step.header, self._needs(step)
        down = tuple(rank for rank in needs if rank in self.down)
        duration_s = self.durations.get(header.model) or self.rng.uniform(0.001, 0.02)
        culprit = next((r.sequence_id for r in step.rows if self.poison.get(r.sequence_id) == header.phase), None)
        if culprit is not None:
            error = f"{header.kv_rank}: ValueError: sequence {culprit} is odd"
            fatal = StepFailed(lane=header.lane, step_seq=header.step_seq, waiting_on=(), error=error, fatal=True)
            self._after(duration_s, now, fatal)
        elif down or self.rng.random() < self.fail_rate:
            ended = 0 if step.num_steps == 1 else self.rng.randrange(step.num_steps)
            ended = min(ended, self._tell(step, duration_s, now, ended))
            self._after((ended + 1) * duration_s, now, _failed(step, down or (needs[-1],), "no flag came"))
        else:
            ended = self._tell(step, duration_s, now, step.num_steps - 1)
            self._after((ended + 1) * duration_s, now, StepDone(result=self._result(step.part(ended))))

    def _tell(self, step: StepDescriptor, duration_s: float, now: float, most: int) -> int:
        """Up to `most` steps of a run are told one by one, none after all rows drew a stop token; how many."""
        known, ended = self.known[step.header.kv_rank], set()
        for idx in range(most):
            sampled = self._result(step.part(idx)).sampled
            rows = zip(step.part(idx).rows, sampled, strict=True)
            ended |= {
                row.sequence_id for row, token in rows if _is_end(known[row.sequence_id].new, row, token.token_id)
            }
            if len(ended) == len(step.rows):
                return idx
            told = StepTokens(lane=step.header.lane, step_seq=step.header.step_seq, sampled=sampled)
            self._after((idx + 1) * duration_s, now, told)
        return most

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            for step in self._alive():
                assert all(row.sequence_id != sequence_id for row in step.rows), "forgotten under a running step"
            self.known.get(kv_rank, {}).pop(sequence_id, None)

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        """At once, whatever runs: nobody's page is written over. A rank that is away copies nothing."""
        if kv_rank in self.down:
            return
        used = {
            frame for known in self.known.values() for each in known.values() for page in each.pages for frame in page
        }
        for copy in copies:
            assert copy.is_stowed or used.isdisjoint(copy.frames), "a page that is brought back has an owner already"
        self._contents.copy(ALL_RANKS if self.kv_ranks else kv_rank, kv_rank, copies)
        self.num_copies += len(copies)

    def lose(self, rank: str, now: float, back_in_s: float | None) -> None:
        """A rank dies; steps that need it fail, and it comes back after `back_in_s`."""
        self.down.add(rank)
        self.known.pop(rank, None)
        self._contents.lose_host(rank)
        if rank in self.kv_ranks:
            first = self.kv_ranks.index(rank) * self.num_frames
            self._contents.lose(ALL_RANKS, range(first, first + self.num_frames))
        else:
            self._contents.lose(rank)
        self._after(0.0, now, RankLost(rank=rank, reason="killed"))
        for lane, step in self.running.items():
            if rank in self._needs(step) and rank in self.models[step.header.model].kv_ranks:
                self.dead.add(lane)
            if rank in self._needs(step):
                self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
                delay_s = self.rng.uniform(0.0, 0.01)
                self._after(delay_s, now, _failed(step, (rank,), f"{rank} is silent"))
            elif lane in self.behind and rank in self._needs(self.behind[lane]):
                if rank in self.models[self.behind[lane].header.model].kv_ranks:
                    self.dead_behind.add(lane)
                self._after(self.rng.uniform(0.0, 0.01), now, _failed(self.behind[lane], (rank,), f"{rank} is silent"))
        heapq.heapify(self._events)
        if back_in_s is not None:
            self._after(back_in_s, now, RankReady(rank=rank, seconds=back_in_s))

    def fail_now(self, lane: int) -> None:
        """Take a step out without an event: the test tells of its end itself."""
        del self.running[lane]
        self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
        heapq.heapify(self._events)

    def next_event_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self._events and self._events[0][0] <= now:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, RankReady):
                self.down.discard(event.rank)
            if isinstance(event, StepTokens):
                self._commit(self.running[event.lane].part(self.told.get(event.lane, 0)))
                self.told[event.lane] = self.told.get(event.lane, 0) + 1
            if isinstance(event, StepDone):
                step = self.running.pop(event.result.lane)
                self._commit(step.part(self.told.pop(event.result.lane, 0)))
                self._promote(step.header.lane, now)
            if isinstance(event, StepFailed):
                events += self._take_out(event)
                continue
            events.append(event)
        return events

    def _promote(self, lane: int, now: float) -> None:
        """The step behind one that ended well runs now, unless its end has been decided already."""
        step = self.behind.pop(lane, None)
        if step is not None:
            self.running[lane] = step
            if lane in self.dead_behind:
                self.dead_behind.discard(lane)
                self.dead.add(lane)
            if not any(_ends(entry[2], lane) for entry in self._events):
                self._begin(step, now)

    def _take_out(self, event: StepFailed) -> list[Event]:
        """A failed step, and with it the one behind it: that does not run and fails right after."""
        lane = event.lane
        behind = self.behind.pop(lane, None)
        self.dead_behind.discard(lane)
        if behind is not None and behind.header.step_seq == event.step_seq:
            return [event]
        self.running.pop(lane)
        self.told.pop(lane, None)
        self.dead.discard(lane)
        self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
        heapq.heapify(self._events)
        return [event] if behind is None else [event, _failed(behind, (), "the step before it failed")]

    def _alive(self) -> list[StepDescriptor]:
        """Steps in flight whose KV rank has not been lost under them."""
        running = [step for lane, step in self.running.items() if lane not in self.dead]
        behind = [step for lane, step in self.behind.items() if lane not in self.dead | self.dead_behind]
        return running + behind

    def _after(self, delay_s: float, now: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (now + delay_s, self._count, event))

    def _check(self, step: StepDescriptor) -> None:
        """Rows and pages obey the contract, whether or not the step will succeed."""
        header, model = step.header, self.models[step.header.model]
        assert header.num_tokens == sum(row.num_new_tokens for row in step.rows) > 0
        assert len({row.sequence_id for row in step.rows}) == len(step.rows)
        before = {}  # rows of the step that this one comes behind
        if header.lane in self.running:
            running, told_steps = self.running[header.lane], self.told.get(header.lane, 0)
            before = {row.sequence_id: row for row in running.rows}
            num_ahead = running.num_steps - told_steps
        busy = {row.sequence_id for other in self._alive() for row in other.rows} - before.keys()
        known = self.known.setdefault(header.kv_rank, {})
        joining = {new.sequence_id: new for new in step.joining}
        for row in step.rows:
            assert row.sequence_id not in busy, "a sequence is in two steps at once"
            if row.sequence_id in joining:
                known[row.sequence_id] = _Known(joining[row.sequence_id], marks=Marks(header.model))
                known[row.sequence_id].num_cached = row.num_cached_tokens  # in pages that others have filled
            sequence = known[row.sequence_id]
            ahead = before.get(row.sequence_id)
            start = sequence.num_cached + (ahead.num_new_tokens * num_ahead if ahead is not None else 0)
            assert row.num_cached_tokens == start, "a step starts where the last one did not end"
            assert (row.token_ids is None) == (header.phase == "decode")
            if row.token_ids is None:
                assert row.num_new_tokens == 1
                assert row.sample
            else:
                tokens = (*sequence.new.prompt_token_ids, *sequence.new.output_token_ids)
                end = row.num_cached_tokens + row.num_new_tokens
                assert row.token_ids == tokens[row.num_cached_tokens : end]
                assert row.sample == (end == len(tokens))
            told = sequence.num_pages if ahead is None else max(sequence.num_pages, _num_pages(ahead))
            assert row.first_new_page <= told, "pages are missing that only a step that failed had"
            needed = row.num_cached_tokens + row.num_new_tokens * step.num_steps
            assert max(told, _num_pages(row)) * model.page_tokens >= needed
            sequence.pages[row.first_new_page :] = row.new_pages
            assert len(sequence.pages) * model.page_tokens >= needed, "a step without its pages"
            self._check_places(step, sequence.pages)
            self._check_contents(step, row, sequence, all_pages=row.sequence_id in joining)
        self.check_frames(header.kv_rank)
        for row in step.rows:
            whole = replace(row, num_new_tokens=row.num_new_tokens * step.num_steps)
            self._spoil(step, whole, known[row.sequence_id])

    def _check_contents(self, step: StepDescriptor, row: StepRow, sequence: _Known, *, all_pages: bool) -> None:
        """Slots that the row attends to hold its sequence's tokens: on all its pages, or on one of them in turns."""
        page_tokens = self.models[step.header.model].page_tokens
        marks = sequence.marks_to(sequence.num_cached)[: sequence.num_cached]
        num_pages = -(-sequence.num_cached // page_tokens)
        for page in range(num_pages) if all_pages else [step.header.step_seq % max(1, num_pages)]:
            part = marks[page * page_tokens : (page + 1) * page_tokens]
            if part:
                self._contents.check(self._where(step), step.header.model, sequence.pages[page], part)

    def _spoil(self, step: StepDescriptor, row: StepRow, sequence: _Known) -> None:
        """What the row writes into is its sequence's alone, and nobody's to read before the step has ended well."""
        header = step.header
        others = [known for key, known in self.known[header.kv_rank].items() if key != row.sequence_id]
        for page, slots, _ in self._written(step, row):
            self._contents.spoil(self._where(step), header.model, sequence.pages[page], slots)
            assert all(sequence.pages[page] not in other.pages for other in others), "a step writes into a shared page"

    def _written(self, step: StepDescriptor, row: StepRow) -> list[tuple[int, range, slice]]:
        """The pages a row writes into: index, slots, and which positions these are."""
        page_tokens = self.models[step.header.model].page_tokens
        stop = row.num_cached_tokens + row.num_new_tokens
        found, start = [], row.num_cached_tokens
        while start < stop:
            page, slot = divmod(start, page_tokens)
            end = min(stop, (page + 1) * page_tokens)
            found.append((page, range(slot, slot + end - start), slice(start, end)))
            start = end
        return found

    def check_frames(self, kv_rank: str) -> None:
        """No frame is in two pages of the sequences that live on the rank, and none is frame 0.

        Of numbered ranks those of all of them are looked at together.
        """
        owners: dict[int, tuple[tuple[int, ...], int]] = {}
        known = [self.known.get(kv_rank, {})] if not self.kv_ranks else self.known.values()
        for sequence in (sequence for own in known for sequence in own.values()):
            for index, page in enumerate(sequence.pages):
                for frame in page:
                    assert 0 < frame < self.num_frames * max(1, len(self.kv_ranks))
                    assert frame % self.num_frames > 0, "a reserved frame"
                    part = tuple(other for other in page if other // self.num_frames == frame // self.num_frames)
                    assert owners.setdefault(frame, (part, index)) == (part, index), f"frame {frame} is owned twice"

    def _where(self, step: StepDescriptor) -> str:
        return ALL_RANKS if self.kv_ranks else step.header.kv_rank

    def _check_places(self, step: StepDescriptor, pages: Sequence[tuple[int, ...]]) -> None:
        """Every page has the right number of frames, on the ranks that the model's split says."""
        model = self.models[step.header.model]
        width = model.frames_per_page
        if not self.kv_ranks:
            assert all(len(page) == width for page in pages)
            return
        for page in pages:
            on = [self.kv_ranks[frame // self.num_frames] for frame in page]
            if model.kv_split == "heads":
                assert on == [rank for rank in model.kv_ranks for _ in range(width)]
            else:
                assert len(page) == width
                assert set(on) <= ({step.header.kv_rank} if model.kv_split == "one" else set(model.kv_ranks))
                assert len(set(on)) == 1

    def _result(self, step: StepDescriptor) -> StepResult:
        known = self.known[step.header.kv_rank]
        sampled = []
        for row in step.rows:
            if row.sample:
                position = row.num_cached_tokens + row.num_new_tokens
                seed = known[row.sequence_id].new.sampling.seed
                sampled.append(SampledToken(row.sequence_id, token_at(seed, position)))
        return StepResult(lane=step.header.lane, step_seq=step.header.step_seq, sampled=tuple(sampled))

    def _commit(self, step: StepDescriptor) -> None:
        """State of sequences changes only when a step ends well."""
        known = self.known.get(step.header.kv_rank, {})
        for row in step.rows:
            if row.sequence_id in known:
                sequence = known[row.sequence_id]
                for page, slots, span in self._written(step, row):
                    marks = sequence.marks_to(span.stop)[span]
                    where = (self._where(step), step.header.model, sequence.pages[page], slots)
                    self._contents.write(*where, marks)
                sequence.num_cached = row.num_cached_tokens + row.num_new_tokens
                sequence.num_pages = max(sequence.num_pages, _num_pages(row))


def _num_pages(row: StepRow) -> int:
    """Pages of the sequence, with those that the row brings."""
    return row.first_new_page + len(row.new_pages)


def _failed(step: StepDescriptor, waiting_on: tuple[str, ...], error: str) -> StepFailed:
    header = step.header
    return StepFailed(lane=header.lane, step_seq=header.step_seq, waiting_on=waiting_on, error=error)


def _is_end(new: NewSequence, row: StepRow, token_id: int) -> bool:
    """Whether the engine ends the sequence with the token that the row drew."""
    num_output = row.num_cached_tokens + row.num_new_tokens - len(new.prompt_token_ids) + 1
    return num_output >= new.sampling.min_tokens and token_id in new.sampling.stop_token_ids


def _ends(event: Event, lane: int) -> bool:
    """Whether the event is of the lane's running step."""
    return (isinstance(event, StepDone) and event.result.lane == lane) or (
        isinstance(event, StepFailed | StepTokens) and event.lane == lane
    )
