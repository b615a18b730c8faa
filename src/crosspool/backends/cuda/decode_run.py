"""A run that the device takes by itself: the records of its steps, and its tokens as they come.

The host enqueues one graph for the whole run and then only reads what has come: each step ends with its tokens and a
word in pinned memory, and begins, or does not, by what `advance` finds on the device.
"""

import time
from collections.abc import Sequence

import numpy as np

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.batch import Batch
from crosspool.backends.cuda.lane_memory import LaneMemory, RunPlace
from crosspool.backends.cuda.link import DeviceInlet
from crosspool.backends.cuda.passes import PASS_TOKENS
from crosspool.backends.cuda.sampling import fill_sampling, needs_host, sampling_records
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch, run_over

NAP_S = 5e-4
"""How late tokens may be read while the device is at later ones."""

LAST_NAP_S = 5e-5
"""The same at the end of a run, when the device is to get its next one."""

REST = 0.97
"""Part of a step's usual time for which nobody looks whether it has ended: looks cost a host more than all it does."""


def runs_on_device(batch: Batch) -> bool:
    """Whether the device can draw every row's tokens and tell which of them end it."""
    if len(batch.rows) > PASS_TOKENS or batch.stop_ids() is None:
        return False
    return not any(needs_host(batch.sampling_row(row)) for row in batch.sampled)


def places(header: StepHeader, num_layers: int) -> list[tuple[int, RunPlace]]:
    """The base and the place of each step of a run, as a rank without rows needs them."""
    over = run_over(header.step_seq, header.num_steps, num_layers)
    return [
        (epoch(header.step_seq, step * num_layers) - 1, RunPlace(over, step, header.num_steps - 1 - step))
        for step in range(header.num_steps)
    ]


def push_run(
    memory: LaneMemory, batch: Batch, header: StepHeader, num_layers: int, bucket: int, page_tokens: int
) -> list[int]:
    """Write the records of all steps; `batch` holds the rows of the first. Returns their slots of the ring.

    Later steps take the tokens of the one before them. Rows that are not in use repeat the first.
    """
    at = np.arange(bucket)
    at[len(batch.rows) :] = 0
    token_ids, positions = batch.token_ids[at], batch.positions[at]
    limits = np.array([table.shape[1] * page_tokens for table in batch.tables])
    stops, slots = batch.stop_ids(), []
    for base, place in places(header, num_layers):
        sampling = sampling_records(bucket)
        for row in batch.sampled:
            fill_sampling(sampling, row.row, batch.sampling_row(row, place.step))
        whole = RunPlace(place.over, place.step, place.left, limits, stops)
        ids = token_ids if place.step == 0 else -1 - at
        slots.append(memory.push(base, num_layers, bucket, ids, positions + place.step, sampling, whole))
    return slots


def read_run(
    memory: LaneMemory,
    batch: Batch,
    step: StepDescriptor,
    slots: Sequence[int],
    num_layers: int,
    inlets: Sequence[DeviceInlet],
) -> HalfStep[tuple[SampledToken, ...]]:
    """Tell and commit the tokens of each step as it ends; returns those of the last one.

    Raises ValueError where the device ended the run for lack of pages.
    """
    ended: set[int] = set()
    told: tuple[SampledToken, ...] = ()
    bases, read_s = places(step.header, num_layers), [time.monotonic()]
    for slot, (base, place) in zip(slots, bases, strict=True):
        nap_s, rest_until_s = NAP_S if place.left else LAST_NAP_S, read_s[-1] + REST * memory.step_s
        yield Wait(inlets, base + num_layers, told, nap_s, rest_until_s)
        read_s.append(time.monotonic())
        tokens = memory.tokens(slot, len(batch.rows))
        if tokens[0] < 0:
            raise ValueError(
                f"the run ended after {place.step} of {step.num_steps} steps: a row lacks a page; "
                "send the pages of all its steps with it"
            )
        pairs = zip(batch.rows, tokens, strict=True)
        sampled = tuple([SampledToken(row.sequence_id, token) for row, token in pairs])
        by_row = dict(enumerate(sampled))
        batch.commit_ahead(place.step, by_row)
        ended |= batch.ended(by_row)
        if len(ended) == len(batch.rows) and place.left:
            batch.end_run(step.num_steps - 1)
            break
        told = sampled
    memory.step_s = (read_s[-1] - read_s[0]) / (len(read_s) - 1)
    return sampled


def rest_of_run(memory: LaneMemory, num_steps: int) -> float:
    """Until when (time.monotonic) a weights rank need not look whether a run of so many steps has ended."""
    return time.monotonic() + REST * num_steps * memory.step_s
