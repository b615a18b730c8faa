"""LimitChange: what an operator asks of the KV pool's limits, in bytes, and the limits in frames that come of it."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.limits import PoolLimits
from crosspool.units import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitChange:
    """New limits of every KV rank; what is not named stays. A floor of 0 keeps nothing, a ceiling of None is none.

    Floors are rounded up to whole pages of their model, ceilings down to them, the budget down to whole frames. Raises
    ValueError for a negative number.
    """

    budget_bytes: int | None = None
    floor_bytes: Mapping[str, int] = field(default_factory=dict)
    ceiling_bytes: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {"the budget": self.budget_bytes}
        named |= {f"the floor of {name}": count for name, count in self.floor_bytes.items()}
        named |= {f"the ceiling of {name}": count for name, count in self.ceiling_bytes.items()}
        for what, count in named.items():
            if count is not None and count < 0:
                raise ValueError(f"{what} is {count} bytes; it must not be negative")

    @property
    def models(self) -> Set[str]:
        """Models that are named."""
        return self.floor_bytes.keys() | self.ceiling_bytes.keys()

    def of(self, models: Set[str]) -> "LimitChange":
        """The part that concerns the pool of these models."""
        return replace(
            self,
            floor_bytes={name: count for name, count in self.floor_bytes.items() if name in models},
            ceiling_bytes={name: count for name, count in self.ceiling_bytes.items() if name in models},
        )


def changed_limits(
    limits: PoolLimits, change: LimitChange, models: Mapping[str, ServedModel], frame_bytes: int
) -> PoolLimits:
    """`limits` after `change`, not checked. `models`: those of the pool; the change names no others."""
    floors, ceilings, budget = dict(limits.floors), dict(limits.ceilings), limits.budget
    if change.budget_bytes is not None:
        budget = change.budget_bytes // frame_bytes
    for name, count in change.floor_bytes.items():
        floors[name] = _whole_pages(models[name], ceil_div(count, _page_bytes(models[name])))
    for name, limit in change.ceiling_bytes.items():
        ceilings.pop(name, None)
        if limit is not None:
            ceilings[name] = _whole_pages(models[name], limit // _page_bytes(models[name]))
    return PoolLimits(budget=budget, floors=floors, ceilings=ceilings)


def first_limits(limits: PoolLimits, model: ServedModel) -> PoolLimits:
    """`limits` with those that `model` comes with, not checked."""
    ceilings = {} if model.kv_ceiling_bytes is None else {model.name: model.kv_ceiling_bytes}
    change = LimitChange(floor_bytes={model.name: model.kv_floor_bytes}, ceiling_bytes=ceilings)
    return changed_limits(limits, change, {model.name: model}, model.frame_bytes)


def _page_bytes(model: ServedModel) -> int:
    return model.frames_per_page * model.frame_bytes


def _whole_pages(model: ServedModel, num_pages: int) -> int:
    return num_pages * model.frames_per_page
