"""Stage times by bytes read and bandwidth: a model's attention and FFN time a layer, before anything is measured.

A lower bound made slightly less so by a fixed time for each segment. Measured cost tables replace it.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec
from crosspool.models.tensors import FLOAT32_TENSORS, ffn_shapes
from crosspool.planner.facts import FFNSpec, ModelFacts
from crosspool.planner.gpus import GPUKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Mean seconds of one decode step's segments. crossing_s: one direction; it occupies neither pool.

    beside_s: the part of the FFN that a weights rank on the KV GPU computes while the others compute theirs.
    """

    num_layers: int
    attention_s: float
    ffn_s: float
    crossing_s: float
    tail_s: float
    beside_s: float = 0.0

    @property
    def step_s(self) -> float:
        """One step alone: all layers and the tail."""
        return self.num_layers * (self.attention_s + max(self.ffn_s, self.beside_s) + 2 * self.crossing_s) + self.tail_s

    def slower(self, factor: float) -> "StageTimes":
        """Every segment takes `factor` times as long."""
        return StageTimes(
            num_layers=self.num_layers,
            attention_s=self.attention_s * factor,
            ffn_s=self.ffn_s * factor,
            crossing_s=self.crossing_s * factor,
            tail_s=self.tail_s * factor,
            beside_s=self.beside_s * factor,
        )

    @property
    def kv_busy_s(self) -> float:
        return self.num_layers * (self.attention_s + self.beside_s) + self.tail_s

    @property
    def weights_busy_s(self) -> float:
        return self.num_layers * self.ffn_s

    @property
    def bottleneck_s(self) -> float:
        """Time of a step that its busier pool cannot give to another lane."""
        return max(self.kv_busy_s, self.weights_busy_s)


def stage_times(
    facts: ModelFacts, kind: GPUKind, *, batch: float, context_tokens: float, num_kv_ranks: int, num_weights_ranks: int
) -> StageTimes:
    """Decode with `batch` sequences of `context_tokens` each. The cache is spread over the KV ranks, weights are not.

    batch below 1 counts as 1: a step that runs has a sequence.
    """
    batch = max(1.0, batch)
    per_second = kind.bandwidth_gb_per_s * 1e9
    head_bytes = facts.spec.vocab_size * facts.spec.hidden_size * facts.element_bytes
    embedding_bytes = head_bytes if facts.spec.tie_word_embeddings else 2 * head_bytes
    attention_bytes = facts.kv_pool_weight_bytes - embedding_bytes
    cache_bytes = batch * context_tokens * facts.kv_bytes_per_token / num_kv_ranks
    ffn_bytes = sum(_read_bytes(ffn, facts.spec.hidden_size, facts.element_bytes, batch) for ffn in facts.ffns())
    layers = facts.num_layers
    row_bytes = batch * facts.spec.hidden_size * facts.element_bytes
    return StageTimes(
        num_layers=layers,
        attention_s=(attention_bytes + cache_bytes) / layers / per_second + kind.segment_s,
        ffn_s=ffn_bytes / num_weights_ranks / layers / per_second + kind.segment_s,
        crossing_s=kind.crossing_s + row_bytes / (kind.link_gb_per_s * 1e9),
        tail_s=head_bytes / per_second + kind.segment_s,
    )


def _read_bytes(ffn: FFNSpec, hidden_size: int, element_bytes: int, batch: float) -> float:
    """Bytes one layer's FFN reads: all that every token passes, and the experts that some token of the batch chose."""
    whole, experts = _ffn_parts(ffn, hidden_size, element_bytes)
    return whole + experts * unique_expert_share(ffn, batch)


def unique_expert_share(ffn: FFNSpec, batch: float) -> float:
    """Expected share of the experts that `batch` tokens use, each choosing top_k uniformly; 1 for a dense FFN."""
    if isinstance(ffn, DenseFFNSpec):
        return 1.0
    return float(1.0 - (1.0 - ffn.top_k / ffn.num_experts) ** batch)


@lru_cache(maxsize=1024)
def _ffn_parts(ffn: FFNSpec, hidden_size: int, element_bytes: int) -> tuple[int, int]:
    whole = experts = 0
    for name, shape in ffn_shapes(ffn, hidden_size).items():
        size = prod(shape) * (4 if name in FLOAT32_TENSORS else element_bytes)
        if isinstance(ffn, MoEFFNSpec) and name.startswith("expert_"):
            experts += size
        else:
            whole += size
    return whole, experts
