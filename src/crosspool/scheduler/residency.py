"""Which model a prefill rank serves next, when it holds one or a few of them and a switch costs time. Pure.

First come, first served, would change the model with nearly every prompt as soon as two are busy. So the model in place
keeps the rank until a prompt of another has waited longer than its own oldest one by `patience` switches to that other:
prompts of so much time run together, and no prompt waits for ones that came later than that. Between models that are
in place at once, which is what the rank has room for, the oldest prompt comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 4.0
SWITCH_BYTES_PER_S = 55e9
"""From pinned host memory over a PCIe 5 bus (`benchmarks/results/prefill_dedicated_h200-x2_2026-11-30.md`)."""


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model with prompts to run. since_s: arrival of its oldest one. num_bytes: of its weights."""

    name: str
    since_s: float
    num_bytes: float

    @property
    def switch_s(self) -> float:
        """What it takes to bring it in."""
        return self.num_bytes / SWITCH_BYTES_PER_S


class Residency:
    """The models in place on one prefill rank, and the order in which others come."""

    def __init__(self, patience: float = PATIENCE, room_bytes: float = 0.0) -> None:
        """room_bytes: of models that are in place at once; one always is."""
        self._sizes: dict[str, float] = {}  # of those in place, the one used last at the end
        self.num_switches = 0
        self._patience, self._room_bytes = patience, room_bytes

    @property
    def resident(self) -> str | None:
        """The model that was used last."""
        return next(reversed(self._sizes), None)

    def order(self, waiting: Sequence[WaitingModel], now_s: float) -> list[str]:
        """The models in the order in which they should get the rank."""

        def urgency(model: WaitingModel) -> float:
            cost_s = 0.0 if model.name in self._sizes else self._patience * model.switch_s
            return now_s - model.since_s - cost_s

        ranked = sorted(waiting, key=lambda model: (-urgency(model), model.name != self.resident, model.name))
        return [model.name for model in ranked]

    def take(self, model: str, num_bytes: float) -> None:
        """The model has got the rank, and others their leave that have not been used for longest."""
        if self._sizes.pop(model, None) is None:
            self.num_switches += 1
        while self._sizes and sum(self._sizes.values()) + num_bytes > self._room_bytes:
            del self._sizes[next(iter(self._sizes))]
        self._sizes[model] = num_bytes

    def forget(self, model: str) -> None:
        """The model is gone."""
        self._sizes.pop(model, None)

    def lost(self) -> None:
        """The rank is away, and comes back empty."""
        self._sizes.clear()
