"""Which model a prefill rank serves next, when it holds one at a time and a switch costs time. Pure.

First come, first served, would change the model with nearly every prompt as soon as two are busy. So the model in place
keeps the rank until a prompt of another has waited longer than its own oldest one by `patience` switches to that other:
prompts of so much time run together, and no prompt waits for ones that came later than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 4.0
SWITCH_BYTES_PER_S = 50e9
"""From pinned host memory: a PCIe 5 bus gives 55 GB/s (`benchmarks/results/reload_h200_2026-11-30.md`)."""


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model with prompts to run. since_s: arrival of its oldest one. switch_s: what it takes to bring it in."""

    name: str
    since_s: float
    switch_s: float


class Residency:
    """The model in place on one prefill rank, and the order in which others come."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.resident: str | None = None
        self.num_switches = 0
        self._patience = patience

    def order(self, waiting: Sequence[WaitingModel], now_s: float) -> list[str]:
        """The models in the order in which they should get the rank."""

        def urgency(model: WaitingModel) -> float:
            cost_s = 0.0 if model.name == self.resident else self._patience * model.switch_s
            return now_s - model.since_s - cost_s

        ranked = sorted(waiting, key=lambda model: (-urgency(model), model.name != self.resident, model.name))
        return [model.name for model in ranked]

    def take(self, model: str) -> None:
        """The model has got the rank."""
        if model != self.resident:
            self.resident = model
            self.num_switches += 1

    def forget(self, model: str) -> None:
        """The model is gone."""
        if model == self.resident:
            self.resident = None

    def lost(self) -> None:
        """The rank is away, and comes back empty."""
        self.resident = None
