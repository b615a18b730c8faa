"""The ways to drive a split model's decode steps that are measured side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.split_model.model import Gpus, SplitModel
from benchmarks.split_model.resident import ResidentModel
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.models.spec import ModelSpec

EARLY = WaitRule(deadline_s=0.3, early=True)


@dataclass(frozen=True)
class Way:
    """is_resident: an FFN server stays on the weights GPUs; else a graph is replayed there for every step."""

    is_resident: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shares_a_gpu(self) -> bool:
        """Whether a weights rank may lie beside attention, where its layers are never fused."""
        return not self.is_resident and self.options.get("rule") is not EARLY


WAYS = {
    "graphs": Way(),
    "fused": Way(options={"fused": True}),
    "route_kv": Way(options={"route": "kv"}),
    "fused_route_kv": Way(options={"fused": True, "route": "kv"}),
    "flags": Way(options={"sums_by": "flags"}),
    "early": Way(options={"rule": EARLY}),
    "fused_early": Way(options={"fused": True, "rule": EARLY}),
    "resident": Way(is_resident=True),
    "resident_route_kv": Way(is_resident=True, options={"route": "kv"}),
}
"""graphs: three kernels a layer, sums as words. fused: a layer is one kernel. route_kv: the KV rank chooses experts.
flags: sums plain, behind a flag. early: kernels behind a wait start beside it, for a GPU of one lane."""


@dataclass(frozen=True)
class Drawn:
    """A model's weights on the GPUs. slices: GPU and layers of each weights rank."""

    name: str
    spec: ModelSpec
    attention: AttentionWeights
    slices: Sequence[tuple[int, Sequence[FFNLayerWeights]]]


def split_model(
    gpus: Gpus,
    drawn: Drawn,
    way: str,
    *,
    batch: int,
    context: int,
    seed: int,
    beside: SplitModel | None = None,
    **options: Any,
) -> SplitModel:
    """beside: a model of the same way whose server serves this one's lane too."""
    chosen = WAYS[way]
    options = {"batch": batch, "context": context, "seed": seed, **chosen.options, **options}
    if not chosen.is_resident:
        return SplitModel(gpus, drawn.spec, drawn.attention, drawn.slices, **options)
    servers = beside.servers if isinstance(beside, ResidentModel) else None
    return ResidentModel(gpus, drawn.spec, drawn.attention, drawn.slices, servers=servers, **options)
