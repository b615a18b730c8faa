"""Schedules of decode runs: the same rows as single steps, or several of them in one descriptor."""

from collections.abc import Sequence

from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow


def prefill(
    model: str, geometry: PageGeometry, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], pages: int
) -> list[StepDescriptor]:
    """One step a sequence, which gets its block table of `pages` pages whole; sequence ids are 0, 1, ..."""
    steps, width = [], geometry.frames_per_page
    for idx, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        first = 1 + idx * pages * width
        table = tuple(tuple(range(first + page * width, first + (page + 1) * width)) for page in range(pages))
        row = StepRow(
            sequence_id=idx,
            token_ids=tuple(prompt),
            num_cached_tokens=0,
            num_new_tokens=len(prompt),
            new_pages=table,
        )
        new = NewSequence(sequence_id=idx, prompt_token_ids=tuple(prompt), output_token_ids=(), sampling=params)
        header = StepHeader(lane=0, model=model, step_seq=10 * (idx + 1), phase="prefill", num_tokens=len(prompt))
        steps.append(StepDescriptor(header=header, rows=(row,), joining=(new,)))
    return steps


def runs(model: str, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[StepDescriptor]:
    """Runs of all the sequences together, of so many steps each, numbered after `prefill`."""
    found, done = [], 0
    for number, length in enumerate(lengths):
        rows = tuple(
            StepRow(sequence_id=idx, token_ids=None, num_cached_tokens=len(prompt) + done, num_new_tokens=1)
            for idx, prompt in enumerate(prompts)
        )
        seq = 1000 + 100 * number
        header = StepHeader(lane=0, model=model, step_seq=seq, phase="decode", num_tokens=len(rows), num_steps=length)
        found.append(StepDescriptor(header=header, rows=rows))
        done += length
    return found


def one_by_one(step: StepDescriptor) -> list[StepDescriptor]:
    """A run's steps, each in a descriptor of its own."""
    return [step.part(idx).replayed(step.header.step_seq + idx) for idx in range(step.num_steps)]
