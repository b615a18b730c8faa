"""What the KV workers of a simulated cluster know of sequences and frames, and the rules that every step must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crosspool.core import SampledToken
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepResult, StepRow
from tests.support.frame_contents import FrameContents, Marks
from tests.support.scripted_tokens import token_at

ALL_RANKS = "all KV ranks"
"""Stands for the rank of frames that are numbered over all of them."""


@dataclass
class Known:
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


class KnownSequences:
    """Sequences by KV rank and id. kv_ranks: those whose frames are numbered one after another, if any."""

    def __init__(self, models: Mapping[str, ServedModel], num_frames: int, kv_ranks: Sequence[str]) -> None:
        self.models = models
        self.num_frames = num_frames
        self.kv_ranks = tuple(kv_ranks)
        all_frames = range(num_frames * max(1, len(self.kv_ranks)))
        self.frames = frozenset(frame for frame in all_frames if frame % num_frames > 0)
        self.known: dict[str, dict[int, Known]] = {}
        self.contents = FrameContents()

    def forget(self, kv_rank: str, sequence_id: int) -> None:
        self.known.get(kv_rank, {}).pop(sequence_id, None)

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        """Nobody's page is written over."""
        used = {
            frame for known in self.known.values() for each in known.values() for page in each.pages for frame in page
        }
        for copy in copies:
            assert copy.is_stowed or used.isdisjoint(copy.frames), "a page that is brought back has an owner already"
        self.contents.copy(ALL_RANKS if self.kv_ranks else kv_rank, kv_rank, copies)

    def lose(self, rank: str) -> None:
        """The rank dies, and what its memory held."""
        self.known.pop(rank, None)
        self.contents.lose_host(rank)
        if rank in self.kv_ranks:
            first = self.kv_ranks.index(rank) * self.num_frames
            self.contents.lose(ALL_RANKS, range(first, first + self.num_frames))
        else:
            self.contents.lose(rank)

    def check(
        self, step: StepDescriptor, before: StepDescriptor | None, num_ahead: int, others: Sequence[StepDescriptor]
    ) -> None:
        """Rows and pages obey the contract, whether or not the step will succeed.

        before: the step that this one comes behind, of which `num_ahead` steps have not been told. others: all steps
        in flight.
        """
        header, model = step.header, self.models[step.header.model]
        assert header.num_tokens == sum(row.num_new_tokens for row in step.rows) > 0
        assert len({row.sequence_id for row in step.rows}) == len(step.rows)
        rows_before = {} if before is None else {row.sequence_id: row for row in before.rows}
        busy = {row.sequence_id for other in others for row in other.rows} - rows_before.keys()
        known = self.known.setdefault(header.kv_rank, {})
        joining = {new.sequence_id: new for new in step.joining}
        for row in step.rows:
            assert row.sequence_id not in busy, "a sequence is in two steps at once"
            if row.sequence_id in joining:
                known[row.sequence_id] = Known(joining[row.sequence_id], marks=Marks(header.model))
                known[row.sequence_id].num_cached = row.num_cached_tokens  # in pages that others have filled
            sequence = known[row.sequence_id]
            ahead = rows_before.get(row.sequence_id)
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
            self._check_frames_of(step, sequence.pages)
            self._check_contents(step, row, sequence, all_pages=row.sequence_id in joining)
        self.check_frames(header.kv_rank)
        holders = Counter(page for each in known.values() for page in each.pages)
        for row in step.rows:
            whole = row._replace(num_new_tokens=row.num_new_tokens * step.num_steps)
            self._spoil(step, whole, known[row.sequence_id], holders)

    def _check_contents(self, step: StepDescriptor, row: StepRow, sequence: Known, *, all_pages: bool) -> None:
        """Slots that the row attends to hold its sequence's tokens: on all its pages, or on one of them in turns."""
        page_tokens = self.models[step.header.model].page_tokens
        marks = sequence.marks_to(sequence.num_cached)[: sequence.num_cached]
        num_pages = -(-sequence.num_cached // page_tokens)
        for page in range(num_pages) if all_pages else [step.header.step_seq % max(1, num_pages)]:
            part = marks[page * page_tokens : (page + 1) * page_tokens]
            if part:
                self.contents.check(self._where(step), step.header.model, sequence.pages[page], part)

    def _spoil(self, step: StepDescriptor, row: StepRow, sequence: Known, holders: Counter[tuple[int, ...]]) -> None:
        """What the row writes into is its sequence's alone, and nobody's to read before the step has ended well."""
        header = step.header
        for page, slots, _ in self._written(step, row):
            self.contents.spoil(self._where(step), header.model, sequence.pages[page], slots)
            assert holders[sequence.pages[page]] == 1, "a step writes into a shared page"

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
        known = [self.known.get(kv_rank, {})] if not self.kv_ranks else self.known.values()
        pages = {place for own in known for each in own.values() for place in enumerate(each.pages)}
        parts = pages if not self.kv_ranks else {(idx, part) for idx, page in pages for part in self._parts(page)}
        frames = [frame for _, part in parts for frame in part]
        assert len(frames) == len(set(frames)), "a frame is owned twice"
        assert self.frames.issuperset(frames), "a reserved frame, or one beyond the last"

    def _parts(self, page: tuple[int, ...]) -> list[tuple[int, ...]]:
        """A page's frames by the rank that has them."""
        ranks = sorted({frame // self.num_frames for frame in page})
        return [tuple(frame for frame in page if frame // self.num_frames == rank) for rank in ranks]

    def _where(self, step: StepDescriptor) -> str:
        return ALL_RANKS if self.kv_ranks else step.header.kv_rank

    def _check_frames_of(self, step: StepDescriptor, pages: Sequence[tuple[int, ...]]) -> None:
        """Every page has the right number of frames, on the ranks that the model's split says."""
        model = self.models[step.header.model]
        width = model.frames_per_page
        if not self.kv_ranks:
            assert {len(page) for page in pages} <= {width}
            return
        for page in pages:
            on = [self.kv_ranks[frame // self.num_frames] for frame in page]
            if model.kv_split == "heads":
                assert on == [rank for rank in model.kv_ranks for _ in range(width)]
            else:
                assert len(page) == width
                assert set(on) <= ({step.header.kv_rank} if model.kv_split == "one" else set(model.kv_ranks))
                assert len(set(on)) == 1

    def result(self, step: StepDescriptor) -> StepResult:
        known = self.known[step.header.kv_rank]
        sampled = []
        for row in step.rows:
            if row.sample:
                position = row.num_cached_tokens + row.num_new_tokens
                seed = known[row.sequence_id].new.sampling.seed
                sampled.append(SampledToken(row.sequence_id, token_at(seed, position)))
        return StepResult(lane=step.header.lane, step_seq=step.header.step_seq, sampled=tuple(sampled))

    def commit(self, step: StepDescriptor) -> None:
        """State of sequences changes only when a step ends well."""
        known = self.known.get(step.header.kv_rank, {})
        for row in step.rows:
            if row.sequence_id in known:
                sequence = known[row.sequence_id]
                for page, slots, span in self._written(step, row):
                    marks = sequence.marks_to(span.stop)[span]
                    where = (self._where(step), step.header.model, sequence.pages[page], slots)
                    self.contents.write(*where, marks)
                sequence.num_cached = row.num_cached_tokens + row.num_new_tokens
                sequence.num_pages = max(sequence.num_pages, _num_pages(row))


def _num_pages(row: StepRow) -> int:
    """Pages of the sequence, with those that the row brings."""
    return row.first_new_page + len(row.new_pages)
