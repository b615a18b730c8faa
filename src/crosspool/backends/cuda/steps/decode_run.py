"""A run that the device takes by itself: the records of its steps, and its tokens as they come.

The host enqueues one graph for the whole run and then only reads what has come: each step ends with its tokens and a
word in pinned memory, and begins, or does not, by what `advance` finds on the device.
"""

import time
from collections.abc import Sequence

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.kernels.sampling import fill_sampling, sampling_records
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.pace import Pace
from crosspool.backends.cuda.steps.records import RunPlace, RunRows
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch, run_over

HALF_WAY = 0.5
"""Part of half a run behind which a rank without rows need not look for the half itself."""


def places(header: StepHeader, num_layers: int, *, may_be_first: bool = False) -> list[tuple[int, RunPlace]]:
    """The base and the place of each step of a run, as a rank without rows needs them. may_be_first: of `RunPlace`."""
    over = run_over(header.step_seq, header.num_steps, num_layers)
    return [
        (
            epoch(header.step_seq, step * num_layers) - 1,
            RunPlace(over, step, header.num_steps - 1 - step, may_be_first=may_be_first),
        )
        for step in range(header.num_steps)
    ]


def push_run(
    memory: LaneMemory, batch: Batch, header: StepHeader, num_layers: int, bucket: int, page_tokens: int
) -> list[int]:
    """Write the records of all steps; `batch` holds the rows of the first. Returns their slots of the ring.

    Later steps take the tokens of the one before them. Rows that are not in use repeat the first.
    """
    stops = batch.stop_ids()
    at = [row if row < len(batch.rows) else 0 for row in range(bucket)]
    sampling = None
    for row in batch.drawn:
        sampling = sampling_records((header.num_steps, bucket)) if sampling is None else sampling
        for step in range(header.num_steps):
            fill_sampling(sampling[step], row.row, batch.sampling_row(row, step))
    limits = [table.shape[1] * page_tokens for table in batch.tables]
    token_ids, positions = [batch.token_ids[row] for row in at], [batch.positions[row] for row in at]
    rows = RunRows(header.num_steps, token_ids, positions, sampling, limits, stops, batch.follows, batch.is_over)
    over = run_over(header.step_seq, header.num_steps, num_layers)
    return memory.push_run(epoch(header.step_seq, 0) - 1, num_layers, over, rows)


def read_run(
    memory: LaneMemory,
    batch: Batch,
    step: StepDescriptor,
    slots: Sequence[int],
    num_layers: int,
    inlets: Sequence[DeviceInlet],
    follows: int = 0,
) -> HalfStep[tuple[SampledToken, ...]]:
    """Tell and commit the tokens of steps that have ended, several at a look; returns those of the last one.

    follows: the last epoch of the run that this one follows on the device; 0: it begins now.

    A run that the device has not begun, since all its sequences had ended, gives tokens that nobody wants. Raises
    ValueError where the device ended the run for lack of pages.
    """
    num_steps, num_rows = step.num_steps, len(batch.rows)
    pace, first_base = memory.pace_of(step.header.model, num_rows), epoch(step.header.step_seq, 0) - 1
    last_epoch = first_base + num_steps * num_layers
    sequence_ids, stop_tokens = [row.sequence_id for row in batch.rows], batch.stop_tokens
    ended: set[int] = set()
    told: list[tuple[SampledToken, ...]] = []
    num_read = 0
    _begin(memory, pace, step.header, follows, num_layers)
    while num_read < num_steps and len(ended) < num_rows:
        wanted = num_read + pace.num_at_once(num_steps - num_read)
        memory.nears_end = wanted == num_steps
        pace.look_for(wanted, lambda: memory.nears_end and memory.last_epoch == last_epoch)
        yield Wait((pace, *inlets), first_base + wanted * num_layers, tuple(told), pace.nap_s)
        num_ended = min(num_steps, max(wanted, (memory.done_epoch - first_base) // num_layers))
        if not all([inlet.arrived(first_base + num_ended * num_layers) for inlet in inlets]):
            num_ended = wanted  # of a step that has failed since that look, and those behind it, tokens are void
        told = []
        for idx, tokens in enumerate(memory.tokens_of(slots[num_read:num_ended], num_rows), num_read):
            if tokens[0] < 0 and idx == 0:  # the run before ended with all its sequences
                batch.end_run(num_steps)
                return batch.last_tokens()
            if tokens[0] < 0:
                raise ValueError(
                    f"the run ended after {idx} of {num_steps} steps: a row lacks a page; "
                    "send the pages of all its steps with it"
                )
            told.append(tuple([SampledToken(*pair) for pair in zip(sequence_ids, tokens, strict=True)]))
            if stop_tokens.isdisjoint(tokens):
                continue
            ended |= batch.ended(dict(enumerate(told[-1])))
            if len(ended) == num_rows:
                break
        batch.commit_ahead(num_read, told)
        num_read += len(told)
        if num_ended < num_steps:
            pace.goes_on(time.monotonic(), num_ended)
        elif len(ended) < num_rows:
            memory.note_end(last_epoch, pace.ends(time.monotonic(), num_steps))
    if num_read < num_steps:
        batch.end_run(num_steps - 1)
    if len(told) > 1:
        yield Wait((), 0, tuple(told[:-1]))
    return told[-1]


def _begin(memory: LaneMemory, pace: Pace, header: StepHeader, follows: int, num_layers: int) -> None:
    """The run begins, or it has: where the device is in the middle of it, that tells when at the latest."""
    num_ended = (memory.done_epoch - epoch(header.step_seq, 0) + 1) // num_layers
    now_s = time.monotonic()
    pace.begin(now_s, memory.end_of(follows), is_ahead=follows > 0)
    if 0 < num_ended < header.num_steps:
        pace.goes_on(now_s, num_ended)


def read_end(
    memory: LaneMemory, header: StepHeader, num_layers: int, inlet: DeviceInlet, follows: int = 0
) -> HalfStep[None]:
    """Wait for the end of a run, as a rank without rows does.

    One look half-way, from which on the next run may be handed over. Where it has been, that one's look half-way finds
    this run's end too: nobody asks this rank for it. follows: as in `read_run`.
    """
    num_steps, first_base = header.num_steps, epoch(header.step_seq, 0) - 1
    pace, over = memory.pace_of(header.model, header.num_tokens), run_over(header.step_seq, num_steps, num_layers)
    last_epoch = first_base + num_steps * num_layers
    _begin(memory, pace, header, follows, num_layers)
    memory.nears_end = False
    half = num_steps // 2
    pace.look_for(half, lambda: False)
    if memory.done_epoch < first_base + HALF_WAY * half * num_layers:
        yield Wait((pace, inlet), first_base + half * num_layers, (), pace.nap_s)
    else:
        pace.arrived(0)
    num_ended = max(0, (memory.done_epoch - first_base) // num_layers)
    if num_ended < num_steps:
        pace.goes_on(time.monotonic(), num_ended)
    memory.nears_end = True
    pace.look_for(num_steps, lambda: memory.last_epoch == last_epoch, half)
    yield Wait((pace, inlet), last_epoch, (), pace.nap_s)
    if memory.done_epoch != over:
        memory.note_end(last_epoch, pace.ends(time.monotonic(), num_steps))
