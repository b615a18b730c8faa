"""PoolLimits: how many frames all models, and each of them, may hold in one KV rank's pool. Pure numbers.

A *floor* is kept for its model whatever others ask for; a *ceiling* is the most that its model may hold. The budget is
what all models together may hold, the unused part of floors included: the sum over models of the larger of what is
held and the floor never exceeds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from crosspool.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """In frames, frame 0 not counted. A model without a floor has none kept; without a ceiling the budget bounds it."""

    budget: int
    floors: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, int] = field(default_factory=dict)

    def floor(self, model: str) -> int:
        return self.floors.get(model, 0)

    def ceiling(self, model: str) -> int:
        return self.ceilings.get(model, self.budget)

    @property
    def kept(self) -> int:
        """Frames of all floors together."""
        return sum(self.floors.values())

    def reach(self, model: str) -> int:
        """Frames one model can come to hold while no other holds more than its floor."""
        return max(0, min(self.ceiling(model), self.budget - self.kept + self.floor(model)))

    def charge(self, frames: Mapping[str, int]) -> int:
        """Frames that models holding `frames` take from the budget: the unused part of floors counts as taken."""
        unused = sum(floor for model, floor in self.floors.items() if model not in frames)
        return unused + sum(max(count, self.floor(model)) for model, count in frames.items())

    def without(self, model: str) -> "PoolLimits":
        """The limits once the model is gone."""
        return replace(
            self,
            floors={name: count for name, count in self.floors.items() if name != model},
            ceilings={name: count for name, count in self.ceilings.items() if name != model},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """What limits are measured against: frames that exist, their bytes, and each model's frames in one page."""

    num_frames: int
    frame_bytes: int
    frames_per_page: Mapping[str, int]


def check_limits(limits: PoolLimits, size: PoolSize) -> None:
    """Raises ValueError, with the true numbers and the remedy, for limits that cannot be held or that shut a model out.

    Whether they hold at this moment does not matter: what live sequences hold beyond them drains away.
    """

    def shown(frames: int) -> str:
        return format_bytes(frames * size.frame_bytes)

    if limits.budget > size.num_frames:
        raise ValueError(
            f"a budget of {shown(limits.budget)} is more than the {shown(size.num_frames)} that the KV pool has; "
            f"ask for at most that, or restart with a larger kv_pool_bytes"
        )
    if limits.kept > limits.budget:
        parts = ", ".join(f"{model} {shown(count)}" for model, count in limits.floors.items() if count)
        raise ValueError(
            f"the floors add up to {shown(limits.kept)} ({parts}), more than the budget of {shown(limits.budget)}; "
            "lower a floor or raise the budget"
        )
    for model, width in size.frames_per_page.items():
        floor, ceiling = limits.floor(model), limits.ceiling(model)
        if model in limits.ceilings and ceiling < width:
            raise ValueError(
                f"a ceiling of {shown(ceiling)} for {model} is less than one page of it, {shown(width)}; "
                "raise it to that or more"
            )
        if floor > ceiling:
            raise ValueError(
                f"a floor of {shown(floor)} for {model} is above its ceiling of {shown(ceiling)}; "
                "lower the floor or raise the ceiling"
            )
        if limits.reach(model) < width:
            others = limits.kept - floor
            raise ValueError(
                f"a budget of {shown(limits.budget)} with {shown(others)} kept for other models leaves "
                f"{model} less than one page of it, {shown(width)}; raise the budget or lower a floor"
            )
