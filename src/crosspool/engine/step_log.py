"""StepLog: the steps that ended lately, for timelines, their totals, and when each model last made progress. Pure."""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from crosspool.engine.stats import StepTotals
from crosspool.scheduler.step import Phase, StepHeader, StepResult

STEPS_KEPT = 2048


class StepSpan(NamedTuple):
    """One step that ended. Times are seconds on the engine's clock.

    attention_s: what the KV worker computed of it. ffn_s, transfer_s: as `StepResult` has them; None on a backend that
    does not tell them apart: then all but attention_s is either.
    """

    lane: int
    phase: Phase
    model: str
    num_tokens: int
    started_s: float
    ended_s: float
    attention_s: float
    ffn_s: float | None = None
    transfer_s: float | None = None


class StepLog:
    """A ring of the last STEPS_KEPT steps, and totals of all by model and phase.

    num_steps, last_step_s: all that ended, those of forgotten models too, and when the last one did.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step_s: float | None = None
        self._spans: deque[StepSpan] = deque(maxlen=STEPS_KEPT)
        self._last_end_s: dict[str, float] = {}
        self._totals: dict[str, dict[Phase, StepTotals]] = {}

    def add(self, header: StepHeader, started_s: float, ended_s: float, result: StepResult, count: int = 1) -> None:
        """A step ended, or `count` steps alike as one."""
        self.num_steps += count
        self.last_step_s = ended_s
        self._last_end_s[header.model] = ended_s
        times = (result.attention_s, result.ffn_s, result.transfer_s)
        span = StepSpan(header.lane, header.phase, header.model, header.num_tokens, started_s, ended_s, *times)
        self._spans.append(span)
        by_phase = self._totals.setdefault(header.model, {})
        totals = by_phase.get(header.phase)
        if totals is None:
            totals = by_phase[header.phase] = StepTotals()
        totals.num_steps += count
        totals.num_tokens += count * header.num_tokens
        totals.attention_s += result.attention_s
        if result.ffn_s is not None and result.transfer_s is not None:
            totals.num_told += count
            totals.ffn_s += result.ffn_s
            totals.transfer_s += result.transfer_s

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

    def totals(self, model: str) -> dict[Phase, StepTotals]:
        """Copies of the model's totals, by phase that it has had."""
        return {phase: replace(totals) for phase, totals in self._totals.get(model, {}).items()}

    def forget(self, model: str) -> None:
        self._last_end_s.pop(model, None)
        self._totals.pop(model, None)
