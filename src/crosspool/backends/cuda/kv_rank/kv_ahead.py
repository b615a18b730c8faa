"""Steps that a KV rank hands its device while the lane's step before them is still under way there."""

from collections.abc import Mapping

from crosspool.backends.cuda.kv_rank.kv_models import KVModels
from crosspool.backends.cuda.kv_rank.kv_pass import KVPass
from crosspool.backends.cuda.kv_rank.kv_passes import KVPassKind
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.backends.cuda.steps.passes import PASS_TOKENS, bucket_of
from crosspool.backends.sequences.sequence import Sequence
from crosspool.scheduler.step import StepDescriptor


class KVAhead:
    """By lane: the rows that its device is at, and those of the step that was found fit to follow them.

    A row of the step behind takes the token that the device draws in the one before: so the device must draw them all
    in both. Nothing that the step needs may make the host wait: its pass is captured, its block tables are there.
    """

    def __init__(self, rank: str, models: KVModels, lanes: WorkerLanes, sequences: Mapping[int, Sequence]) -> None:
        self._rank = rank
        self._models = models
        self._lanes = lanes
        self._sequences = sequences
        self._at: dict[int, Batch] = {}
        self._runs: set[int] = set()  # lanes that are at a run
        self._fit: dict[int, tuple[int, Batch]] = {}  # step_seq, rows

    def begins(self, lane: int, batch: Batch, *, is_run: bool) -> None:
        """These rows are handed to the device, which in a run sees which of them end."""
        self._at[lane] = batch
        (self._runs.add if is_run else self._runs.discard)(lane)

    def ended(self, lane: int, batch: Batch) -> None:
        """The step of these rows has ended here."""
        if self._at.get(lane) is batch:
            del self._at[lane]

    def take(self, step: StepDescriptor) -> Batch | None:
        """The rows of a step that `is_fit` found fit last; None for any other, which waits until its lane is idle."""
        step_seq, batch = self._fit.pop(step.header.lane, (0, None))
        return batch if step_seq == step.header.step_seq else None

    def is_fit(self, step: StepDescriptor) -> bool:
        """Whether the step may be handed over now, behind the one that the device is at."""
        header, before = step.header, self._at.get(step.header.lane)
        lane = self._lanes[header.lane]
        if before is None or not lane.memory.nears_end or header.kv_rank != self._rank:
            return False
        if header.phase != "decode" or step.joining or header.num_tokens > PASS_TOKENS:
            return False
        if any(row.sequence_id not in self._sequences for row in step.rows):
            return False
        model = self._models.led(header.model)
        kind = KVPassKind(bucket_of(header.num_tokens), True, True)
        source = lane.captured(header.model, kind, in_loop=header.num_steps > 1)
        if not isinstance(source, KVPass) or model.split != "one":
            return False
        batch = Batch(step, self._sequences, model.geometry.page_tokens, before)
        if header.lane not in self._runs:
            batch.follows = 0  # the device does not know whether its rows have ended
        tables = [batch.tables[row] for row in kind.row_numbers(header.num_tokens)]
        if not before.is_all_drawn or not batch.is_all_drawn or not source.rows.are_set(tables):
            return False
        self._fit[header.lane] = (header.step_seq, batch)
        return True
