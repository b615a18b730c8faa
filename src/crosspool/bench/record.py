"""What became of one request, as the client saw it."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from crosspool.workload.trace import FloatColumn

Outcome = Literal["served", "refused", "failed"]
REFUSALS = (429, 503)
"""HTTP statuses by which a server says that it has no room now."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """All times in seconds from the start of the run.

    due_s: when it should have been sent; started_s: when its turn came (later where concurrency is bounded); sent_s:
    when its last byte was written. token_times_s: when each event with tokens came. output_tokens and
    server_prompt_tokens: as the server counts them, else the events and the prompt as asked for.
    """

    index: int
    model: str
    prompt_tokens: int
    due_s: float
    started_s: float = 0.0
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    outcome: Outcome = "failed"
    status: int = 0
    error: str = ""
    output_tokens: int = 0
    server_prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """From its turn to the first token, connection included."""
        return self.token_times_s[0] - self.started_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.started_s

    @property
    def gaps_s(self) -> FloatColumn:
        """Every time between two events with tokens: TBT."""
        return np.diff(np.asarray(self.token_times_s))

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for an answer of one token, or one that came in one event."""
        if self.output_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)
