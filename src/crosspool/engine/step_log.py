"""StepLog: the steps that ended lately, for timelines, and when each model last made progress. Pure."""

from collections import deque
from typing import NamedTuple

from crosspool.scheduler.step import Phase, StepHeader

STEPS_KEPT = 2048


class StepSpan(NamedTuple):
    """One step that ended. Times are seconds on the engine's clock.

    attention_s: what the KV worker computed of it; the rest of the step is transfer, FFN and waiting for either.
    """

    lane: int
    phase: Phase
    model: str
    num_tokens: int
    started_s: float
    ended_s: float
    attention_s: float


class StepLog:
    """A ring of the last STEPS_KEPT steps."""

    def __init__(self) -> None:
        self._spans: deque[StepSpan] = deque(maxlen=STEPS_KEPT)
        self._last_end_s: dict[str, float] = {}

    def add(self, header: StepHeader, started_s: float, ended_s: float, attention_s: float) -> None:
        self._last_end_s[header.model] = ended_s
        self._spans.append(
            StepSpan(header.lane, header.phase, header.model, header.num_tokens, started_s, ended_s, attention_s)
        )

    def since(self, moment_s: float) -> list[StepSpan]:
        """Steps that ended after `moment_s`, oldest first."""
        found = []
        for span in reversed(self._spans):
            if span.ended_s <= moment_s:
                break
            found.append(span)
        return found[::-1]

    def last_end_s(self, model: str) -> float | None:
        """When a step of the model last ended."""
        return self._last_end_s.get(model)

    def forget(self, model: str) -> None:
        self._last_end_s.pop(model, None)
