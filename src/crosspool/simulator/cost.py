"""Stage times of any step of one model on given GPUs: the planner's roofline, with compute and several ranks added.

Bytes come from `planner/roofline.py`. Prefill chunks are also bound by arithmetic; hidden rows leave the KV pool once
for every weights rank; several KV ranks merge partial attention, one more crossing a layer. Measured points replace
stage times where there are any (`measured.py`). A share of every FFN may lie beside attention, on the KV GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from crosspool.config import PREFILL_TOKENS
from crosspool.models.spec import DenseFFNSpec, MLASpec
from crosspool.planner.facts import FFNSpec, ModelFacts
from crosspool.planner.gpus import GPUKind
from crosspool.planner.roofline import StageTimes, stage_times
from crosspool.scheduler.step import StepDescriptor
from crosspool.units import ceil_div

SUSTAINED_TFLOPS: dict[str, float] = {"a100-40gb": 190.0, "a100-80gb": 190.0, "h100-80gb": 590.0, "h200": 590.0}
"""Dense bf16, 60 % of the data sheet: what large matrix products reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What a step's cost depends on.

    num_tokens: rows of hidden states. kv_tokens: slots that attention reads, over all rows. pairs: query-key pairs.
    num_sampled: rows whose logits are computed.
    """

    num_tokens: int
    kv_tokens: float
    pairs: float
    num_sampled: int


def step_work(step: StepDescriptor) -> StepWork:
    """The work of a step as the engine hands it out."""
    tokens, kv_tokens, pairs, sampled = 0, 0, 0.0, 0
    for row in step.rows:
        new, cached = row.num_new_tokens, row.num_cached_tokens
        tokens += new
        kv_tokens += cached + new
        pairs += new * (cached + (new + 1) / 2)
        sampled += row.sample
    return StepWork(num_tokens=tokens, kv_tokens=kv_tokens, pairs=pairs, num_sampled=sampled)


def decode_work(batch: int, kv_tokens: float) -> StepWork:
    """A decode step of `batch` sequences that see `kv_tokens` slots together."""
    return StepWork(num_tokens=batch, kv_tokens=kv_tokens, pairs=kv_tokens, num_sampled=batch)


def prompt_works(num_tokens: int) -> list[StepWork]:
    """The chunks of one prompt on GPUs, the last of which samples."""
    chunk_tokens, works = PREFILL_TOKENS["cuda"], []
    for cached in range(0, num_tokens, chunk_tokens):
        new = min(chunk_tokens, num_tokens - cached)
        is_last = cached + new == num_tokens
        pairs = new * (cached + (new + 1) / 2)
        works.append(StepWork(num_tokens=new, kv_tokens=cached + new, pairs=pairs, num_sampled=int(is_last)))
    return works


class StepCost(Protocol):
    """Stage times of one model's steps."""

    def times(self, work: StepWork) -> StageTimes: ...

    def beside_others(self, work: StepWork) -> float:
        """How much longer each segment takes while other lanes are in flight, beyond waiting for its turn."""
        ...


class PooledCost:
    """The roofline of one model whose attention has `num_kv` GPUs and whose FFN has `num_weights` others.

    beside_share: of the FFN's width, on the KV GPU.
    """

    def __init__(
        self, facts: ModelFacts, kind: GPUKind, *, num_kv: int, num_weights: int, beside_share: float = 0.0
    ) -> None:
        self.facts, self.kind = facts, kind
        self.num_kv, self.num_weights, self.beside_share = num_kv, num_weights, beside_share
        base, longer = (self._stages(1, context) for context in (0.0, 1e6))
        self._attention_s = base.attention_s + (kind.crossing_s if num_kv > 1 else 0.0)
        self._kv_token_s = (longer.attention_s - base.attention_s) / 1e6
        self._tail_s = base.tail_s
        self._by_tokens: dict[int, StageTimes] = {}
        rates = _rates(facts, kind)
        self._projection_s, self._pair_s = rates.projection_s, rates.pair_s / num_kv
        self._expert_s = rates.ffn_s / num_weights

    def times(self, work: StepWork) -> StageTimes:
        ffn = self._by_tokens.get(work.num_tokens)
        if ffn is None:
            ffn = self._by_tokens[work.num_tokens] = self._ffn(work.num_tokens)
        attention_s = max(
            self._attention_s + work.kv_tokens * self._kv_token_s,
            self.kind.segment_s + work.num_tokens * self._projection_s + work.pairs * self._pair_s,
        )
        return StageTimes(
            num_layers=ffn.num_layers,
            attention_s=attention_s,
            ffn_s=ffn.ffn_s,
            crossing_s=ffn.crossing_s,
            tail_s=self._tail_s if work.num_sampled else self.kind.segment_s,
            beside_s=ffn.beside_s,
        )

    def beside_others(self, work: StepWork) -> float:
        return 1.0

    def ffn_parts(self, whole_s: float, bound_s: float) -> tuple[float, float]:
        """(on the weights GPUs, on the KV GPU) of a layer's FFN that would take `whole_s` were none of it there.

        bound_s: the same by the roofline. Only bytes and arithmetic are cut; what a layer takes beyond does not shrink
        (on an H200 a layer of Qwen3-30B-A3B takes 42 us at batch 12 however narrow its slice).
        """
        share, width_s = self.beside_share, min(whole_s, bound_s) - self.kind.segment_s
        if not share:
            return whole_s, 0.0
        fixed_s = whole_s - width_s
        return fixed_s + (1 - share) * width_s, fixed_s + share * self.num_weights * width_s

    def _stages(self, num_tokens: int, context: float) -> StageTimes:
        return stage_times(
            self.facts,
            self.kind,
            batch=num_tokens,
            context_tokens=context,
            num_kv_ranks=self.num_kv,
            num_weights_ranks=self.num_weights,
        )

    def _ffn(self, num_tokens: int) -> StageTimes:
        """FFN and crossing for so many rows; the KV pool's link carries them once for each weights rank."""
        stages = self._stages(num_tokens, 0.0)
        row_s = num_tokens * self.facts.spec.hidden_size * self.facts.element_bytes / (self.kind.link_gb_per_s * 1e9)
        bound_s = max(stages.ffn_s, self.kind.segment_s + num_tokens * self._expert_s)
        ffn_s, beside_s = self.ffn_parts(bound_s, bound_s)
        return replace(
            stages, ffn_s=ffn_s, beside_s=beside_s, crossing_s=self.kind.crossing_s + self.num_weights * row_s
        )


class MonolithicCost:
    """The roofline of one model that lies whole on `num_gpus` GPUs, tensor parallel.

    Attention weights are cut by KV heads and replicated beyond. A sequence's cache lies on `replica_gpus` GPUs, one
    of several replicas that share the sequences of a step; the fullest sets the pace. `crossing_s` stands for one of a
    layer's two all-reduces, which cost two crossings; on one GPU for none.
    """

    def __init__(self, facts: ModelFacts, kind: GPUKind, *, num_gpus: int, replica_gpus: int | None = None) -> None:
        self.facts, self.kind, self.num_gpus = facts, kind, num_gpus
        self._num_replicas = num_gpus // (replica_gpus or num_gpus)
        self.pooled = PooledCost(facts, kind, num_kv=num_gpus, num_weights=num_gpus)
        self._share = min(num_gpus, facts.num_kv_heads)
        whole = stage_times(facts, kind, batch=1, context_tokens=0, num_kv_ranks=1, num_weights_ranks=1)
        merge_s = kind.crossing_s if num_gpus > 1 else 0.0
        self._saved_s = (whole.attention_s - kind.segment_s) * (1 - 1 / self._share) + merge_s

    def times(self, work: StepWork) -> StageTimes:
        num_sequences = work.num_sampled if work.num_sampled == work.num_tokens else 1  # a chunk is taken for one
        fullest = self._num_replicas * ceil_div(num_sequences, self._num_replicas) / num_sequences
        stages = self.pooled.times(replace(work, kv_tokens=work.kv_tokens * fullest, pairs=work.pairs * fullest))
        return StageTimes(
            num_layers=stages.num_layers,
            attention_s=max(self.kind.segment_s, stages.attention_s - self._saved_s),
            ffn_s=stages.ffn_s,
            crossing_s=2 * stages.crossing_s if self.num_gpus > 1 else 0.0,
            tail_s=self.kind.segment_s + (stages.tail_s - self.kind.segment_s) / self.num_gpus,
        )

    def beside_others(self, work: StepWork) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds of arithmetic a layer: of one token's projections, of one query-key pair, of one token's FFN."""

    projection_s: float
    pair_s: float
    ffn_s: float


def _rates(facts: ModelFacts, kind: GPUKind) -> _Rates:
    per_second = SUSTAINED_TFLOPS.get(kind.name, min(SUSTAINED_TFLOPS.values())) * 1e12
    spec, layers = facts.spec, facts.num_layers
    embeddings = (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size
    projections = facts.kv_pool_weight_bytes / facts.element_bytes - embeddings
    pairs = 0.0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, MLASpec):  # absorbed: scores over latent and rope key, values are the latent
            pairs += attention.num_heads * (2 * attention.kv_lora_rank + attention.qk_rope_head_dim)
        else:
            pairs += attention.num_heads * 2 * attention.head_dim
    active = sum(_active_parameters(facts.ffns(), spec.hidden_size))
    return _Rates(
        projection_s=2 * projections / layers / per_second,
        pair_s=2 * pairs / layers / per_second,
        ffn_s=2 * active / layers / per_second,
    )


def _active_parameters(ffns: Iterable[FFNSpec], hidden_size: int) -> Iterable[int]:
    for ffn in ffns:
        if isinstance(ffn, DenseFFNSpec):
            yield 3 * hidden_size * ffn.intermediate_size
        else:
            shared = ffn.shared.intermediate_size if ffn.shared is not None else 0
            yield 3 * hidden_size * (ffn.top_k * ffn.expert_intermediate_size + shared)
