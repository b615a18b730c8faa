"""RequestTable: the requests of one model as joint rows of prompt, output, reserved output and service time.

Everything the planner computes for a model, closed forms and samples alike, is over one such table, so the two can be
compared exactly. A row stays a row: long outputs are the ones that hold memory for long, and drawing the columns apart
would lose that.
"""

from dataclasses import dataclass

import numpy as np

from crosspool.workload.lengths import Lengths
from crosspool.workload.trace import FloatColumn, IntColumn, Trace

NUM_ROWS = 16384
"""Rows drawn from a distribution of lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadySpeed:
    """How long requests hold their KV: prefill at a constant rate, then one token every `tbt_s`."""

    tbt_s: float
    prefill_tokens_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not self.tbt_s > 0:
            raise ValueError(f"tbt is {self.tbt_s} s; it must be above 0")
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill speed is {self.prefill_tokens_per_s} tokens/s; it must be above 0")

    def service_s(self, prompt_tokens: IntColumn, output_tokens: IntColumn) -> FloatColumn:
        return prompt_tokens / self.prefill_tokens_per_s + output_tokens * self.tbt_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestTable:
    """Equally likely rows of one model's requests. max_tokens: output tokens that the client asks for, >= output."""

    prompt_tokens: IntColumn
    output_tokens: IntColumn
    max_tokens: IntColumn
    service_s: FloatColumn

    def __post_init__(self) -> None:
        if not len(self.service_s):
            raise ValueError("a load has no request; give at least one, or rate 0 by leaving the model's load out")
        if not bool((self.service_s > 0).all()):
            row = int(np.argmin(self.service_s > 0))
            raise ValueError(f"service time of request {row + 1} is {self.service_s[row]} s; it must be above 0")

    @property
    def num_rows(self) -> int:
        return len(self.service_s)

    @property
    def mean_service_s(self) -> float:
        return float(self.service_s.mean())

    def with_service(self, service: SteadySpeed) -> "RequestTable":
        """The same requests at another speed."""
        return RequestTable(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.max_tokens,
            service_s=service.service_s(self.prompt_tokens, self.output_tokens),
        )


def table_from_lengths(
    lengths: Lengths,
    service: SteadySpeed,
    rng: np.random.Generator,
    *,
    max_tokens: int | None = None,
    num_rows: int = NUM_ROWS,
) -> RequestTable:
    """`num_rows` requests drawn from `lengths`. max_tokens None: clients ask for exactly what they get."""
    prompt, output = lengths.draw(rng, num_rows)
    return RequestTable(
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=_asked(output, max_tokens),
        service_s=service.service_s(prompt, output),
    )


def table_from_trace(trace: Trace, service: SteadySpeed | None, *, max_tokens: int | None = None) -> RequestTable:
    """The rows of a trace of one model, in its order; recorded service times win over `service`.

    Raises ValueError where neither gives a time. A request without output holds its prompt until its first token.
    """
    output = np.maximum(1, trace.output_tokens)
    held = trace.service_s
    unknown = np.isnan(held)
    if unknown.any():
        if service is None:
            raise ValueError("the trace has no service times; give `service: {tbt_ms: ...}` or a cost table")
        held = np.where(unknown, service.service_s(trace.prompt_tokens, output), held)
    return RequestTable(
        prompt_tokens=trace.prompt_tokens, output_tokens=output, max_tokens=_asked(output, max_tokens), service_s=held
    )


def _asked(output: IntColumn, max_tokens: int | None) -> IntColumn:
    return output if max_tokens is None else np.maximum(output, max_tokens)
