"""Plan: what the planner decided, frozen and serialisable. serve, simulate and bench read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from crosspool.config import AdmissionPolicy
from crosspool.errors import unreadable_because
from crosspool.kv_pool.split import KVSplit
from crosspool.planner.memory import GPUMemory

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """One model in its group.

    ffn_slice_bytes: of each weights rank, in the order of `weights_ranks`. floor_pages are kept for this model,
    ceiling_pages are all it may hold. longest_context_tokens: prompt and output of one request, with the pool otherwise
    empty but for the others' floors; never above the model's own max_context_tokens. seen_tokens: the same without that
    limit. mean_bytes and deviation_bytes count tokens exactly, quantile_bytes whole pages of this model alone.
    """

    name: str
    source: str
    servable: bool
    attention_kind: str
    kv_ranks: tuple[str, ...]
    kv_parallelism: KVSplit
    weights_ranks: tuple[str, ...]
    ffn_slice_bytes: tuple[int, ...]
    kv_pool_weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    page_tokens: int
    frames_per_page: int
    floor_pages: int
    ceiling_pages: int
    longest_context_tokens: int
    seen_tokens: int
    max_context_tokens: int
    guaranteed_context_tokens: int
    rate_rps: float
    mean_service_s: float
    tbt_s: float
    mean_live: float
    mean_bytes: float
    deviation_bytes: float
    quantile_bytes: float

    @property
    def tp_degree(self) -> int:
        return len(self.weights_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeModel:
    """A model on prefill ranks. whole_bytes: in host memory, and in place. switch_s: to bring it in from there."""

    name: str
    whole_bytes: int
    switch_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """GPUs of a group for prompts alone.

    room_bytes: of each, for whole models in place, of which num_in_place of the largest fit at once. host_bytes: what
    each rank keeps in the host's memory. in_pools: models whose prompts run in the pools all the same.
    """

    ranks: tuple[str, ...]
    gpus: tuple[GPUMemory, ...]
    room_bytes: int
    host_bytes: int
    num_in_place: int
    models: tuple[WholeModel, ...]
    in_pools: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group of GPUs with its two pools.

    budget_bytes: of all KV ranks together, whole frames, the one that each rank keeps back excluded. required_bytes:
    the quantile of active KV, between required_low and required_high with the plan's confidence. coverage: share of
    random moments at which demand fits the budget.
    """

    name: str
    kv_ranks: tuple[str, ...]
    weights_ranks: tuple[str, ...]
    gpus: tuple[GPUMemory, ...]
    budget_bytes: int
    budget_bytes_per_rank: int
    required_bytes: int
    required_low_bytes: int
    required_high_bytes: int
    exact_quantile_bytes: int
    mean_bytes: float
    effective_samples: float
    reached_precision: bool
    coverage: float
    pooling_gain: float
    step_s: float
    models: tuple[ModelPlan, ...]
    prefill: PrefillPlan | None = None  # none: prompts run in the pools

    @property
    def num_gpus(self) -> int:
        """Those of its prefill ranks among them."""
        return len(self.gpus) + (len(self.prefill.gpus) if self.prefill is not None else 0)

    def model(self, name: str) -> ModelPlan:
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """What another way to use the same GPUs gives: longest context one request of each model sees; 0: not placed."""

    layout: Literal["crosspool", "static", "elastic"]
    fits: bool
    note: str
    kv_bytes: int
    gpus: tuple[str, ...]
    seen_tokens: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How models were grouped. gap: proven distance of the objective from the best possible one; 0: exact."""

    objective: float
    gap: float
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole plan. `notes`: what was assumed, and what someone should know before buying."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    version: int
    seed: int
    quantile: float
    precision: float
    confidence: float
    admission: AdmissionPolicy
    gpu_kind: str
    gpu_memory_bytes: int
    frame_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int | None  # none: not asked for, so the backend's own
    num_decode_lanes: int
    num_prefill_lanes: int
    groups: tuple[GroupPlan, ...]
    layouts: tuple[LayoutResult, ...]
    placement: Placement
    notes: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    def group_named(self, name: str | None) -> GroupPlan:
        """The group of this name; None: the only one. Raises ValueError listing the groups."""
        names = ", ".join(group.name for group in self.groups)
        if name is None:
            if len(self.groups) != 1:
                raise ValueError(f"the plan has groups {names}; choose one with --plan-group")
            return self.groups[0]
        for group in self.groups:
            if group.name == name:
                return group
        raise ValueError(f"the plan has no group {name!r}; it has {names}")

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"


def plan_from_json(text: str, source: str = "plan") -> Plan:
    """A plan as `to_json` wrote it. Raises ValueError naming `source` and the field that is wrong."""
    try:
        plan = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{source} is not a plan: {where}: {first['msg']}") from None
    if plan.version != PLAN_VERSION:
        raise ValueError(f"{source} has plan version {plan.version}, this is version {PLAN_VERSION}; plan again")
    return plan


def read_plan(path: Path) -> Plan:
    """Raises ValueError, in one line, for an unreadable file or one that is no plan."""
    try:
        return plan_from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {unreadable_because(error)}") from None


_ADAPTER = TypeAdapter(Plan)
