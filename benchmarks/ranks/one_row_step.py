"""A step of one sequence alone, for what is stepped by hand without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from crosspool.core import SamplingParams
from crosspool.kv_pool.pool import Page
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow


def one_row_step(
    model: str,
    kv_rank: str,
    step_seq: int,
    sequence_id: int,
    token_ids: Sequence[int] | None,
    num_cached: int,
    *,
    new_pages: Sequence[Page] = (),
    joining: SamplingParams | None = None,
) -> StepDescriptor:
    """Of lane 0: the tokens at positions from `num_cached` on; None: the one that the sequence sampled last.

    joining: how the sequence samples, which is new then.
    """
    count = 1 if token_ids is None else len(token_ids)
    header = StepHeader(
        lane=0,
        model=model,
        step_seq=step_seq,
        phase="decode" if count == 1 else "prefill",
        num_tokens=count,
        kv_rank=kv_rank,
    )
    row = StepRow(
        sequence_id=sequence_id,
        token_ids=None if token_ids is None else tuple(token_ids),
        num_cached_tokens=num_cached,
        num_new_tokens=count,
        new_pages=tuple(new_pages),
    )
    new: tuple[NewSequence, ...] = ()
    if joining is not None:
        prompt = tuple(token_ids or ())
        new = (NewSequence(sequence_id=sequence_id, prompt_token_ids=prompt, output_token_ids=(), sampling=joining),)
    return StepDescriptor(header=header, rows=(row,), joining=new)
