"""How fast each model runs in a group: steady as told, or what a cost model and the demand agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crosspool.planner.demand import ModelLoad, mean_bytes
from crosspool.planner.deployment import PlanInput
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.request_table import SteadySpeed
from crosspool.planner.roofline import StageTimes, stage_times
from crosspool.planner.service import CostModel, RooflineCost, Speeds, agree
from crosspool.planner.traffic import PlannedModel

CostFactory = Callable[[int, int], CostModel]
"""The cost model of a group, by its numbers of KV and weights ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeedRule:
    """Speeds under one input. cost_factory None: the input's own cost, a steady speed or the roofline."""

    plan_input: PlanInput
    cost_factory: CostFactory | None = None

    @property
    def steady(self) -> SteadySpeed | None:
        service = self.plan_input.service
        if service.tbt_ms is None or self.cost_factory is not None:
            return None
        return SteadySpeed(tbt_s=service.tbt_ms / 1e3, prefill_tokens_per_s=service.prefill_tokens_per_s)

    def speeds(self, models: Sequence[PlannedModel], num_kv: int, num_weights: int) -> Speeds:
        """Of every model with load whose trace does not tell.

        Raises CapacityError where more arrives than can be served.
        """
        traffic = [item for model in models if (item := model.traffic()) and not model.has_recorded_service]
        if not traffic:
            return {}
        if self.steady is not None:
            return {item.facts.name: self.steady for item in traffic}
        return agree(traffic, self._cost(num_kv, num_weights))[0]

    def stages(self, model: PlannedModel, load: ModelLoad | None, num_kv: int, num_weights: int) -> StageTimes:
        """Roofline stage times at the load's mean batch and context; at batch 1 and no context without one."""
        context = 0.0
        if load is not None and load.mean_live > 0:
            context = mean_bytes(load) / load.mean_live / model.facts.kv_bytes_per_token
        return stage_times(
            model.facts,
            gpu_kind(self.plan_input.gpus.kind),
            batch=load.mean_live if load is not None else 1.0,
            context_tokens=context,
            num_kv_ranks=num_kv,
            num_weights_ranks=num_weights,
        )

    def step_s(self, models: Sequence[PlannedModel], num_kv: int, num_weights: int) -> float:
        """Roofline step time at batch 1, averaged over the models by rate; alike where none has one."""
        total_rate = sum(model.rate_rps for model in models)
        weights = [model.rate_rps / total_rate if total_rate else 1.0 / len(models) for model in models]
        steps = [self.stages(model, None, num_kv, num_weights).step_s for model in models]
        return sum(weight * step for weight, step in zip(weights, steps, strict=True))

    def _cost(self, num_kv: int, num_weights: int) -> CostModel:
        if self.cost_factory is not None:
            return self.cost_factory(num_kv, num_weights)
        bounds = self.plan_input.bounds
        return RooflineCost(
            kind=gpu_kind(self.plan_input.gpus.kind),
            num_kv_ranks=num_kv,
            num_weights_ranks=num_weights,
            max_num_seqs=bounds.max_num_seqs,
            chunk_tokens=bounds.max_num_batched_tokens,
        )
