"""An output of one token."""

from __future__ import annotations

from crosspool.core import FinishReason
from crosspool.engine.output import RequestOutput, Timings, Usage


def an_output(reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        index=0,
        text="x",
        token_ids=(1,),
        token_times_s=(0.0,),
        logprobs=None,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(arrival_s=0.0),
        finish_reason=reason,
    )
