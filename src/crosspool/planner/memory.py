"""Bytes of everything on each GPU. The parts add up to the GPU's memory; what nothing uses is a part too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from crosspool.models.tensors import FLOAT32_TENSORS, TensorSpec, ffn_shapes
from crosspool.planner.facts import FFNSpec, ModelFacts
from crosspool.units import GiB, MiB
from crosspool.weights_pool.placement import intermediate_slices
from crosspool.weights_pool.regions import destination_shape, intermediate_width

NUM_SLOTS = 2
"""Buffers of a channel, by layer parity."""

PARTIAL_SUM_BYTES = 4
"""Partial sums of an FFN cross in float32."""

LOGIT_BYTES = 8
"""Float32 logits and the probabilities made from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """What is assumed where no formula tells. Set them from a measurement where there is one."""

    runtime_bytes: int = 1 * GiB  # driver context, loaded kernels, library workspaces
    graph_bytes: int = 32 * MiB  # captured steps of one model in one decode lane, all batch sizes
    reserve_fraction: float = 0.01  # of the GPU, kept free against fragmentation

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_fraction < 1:
            raise ValueError(f"reserve is {self.reserve_fraction:.0%} of a GPU; it must lie between 0 and 100 %")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBounds:
    """The largest steps the engine runs."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_decode_lanes: int = 2
    num_prefill_lanes: int = 1
    frame_bytes: int = 2 * MiB
    num_prefill_ranks: int = 0  # with a lane each, in place of the prefill lanes' number

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_decode_lanes", "num_prefill_lanes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def max_tokens(self) -> int:
        return max(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def tokens_in_flight(self) -> int:
        """Rows that all lanes together may have under way."""
        return self.num_decode_lanes * self.max_num_seqs + self.num_prefill_lanes * self.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMemory:
    """One GPU: `parts` add up to `total_bytes`, `free` included."""

    rank: str
    total_bytes: int
    parts: dict[str, int]

    def __post_init__(self) -> None:
        assert sum(self.parts.values()) == self.total_bytes, f"parts of {self.rank} do not add up: {self.parts}"
        assert all(part >= 0 for part in self.parts.values()), f"a part of {self.rank} is negative: {self.parts}"


def fill_gpu(rank: str, total_bytes: int, parts: Mapping[str, int]) -> GPUMemory:
    """A GPU with `parts` and the rest as `free`. The caller has checked that they fit."""
    return GPUMemory(rank=rank, total_bytes=total_bytes, parts={**parts, "free": total_bytes - sum(parts.values())})


def ffn_slice_bytes(facts: ModelFacts, num_ranks: int) -> list[int]:
    """Bytes of each weights rank's slice of all FFNs, by the same cuts the loader makes. Routers are on every rank.

    Raises ValueError, naming the model, where it is too narrow for so many ranks.
    """
    try:
        return list(_slice_bytes(_counted(facts), facts.spec.hidden_size, facts.element_bytes, num_ranks))
    except ValueError as error:
        raise ValueError(f"{facts.name}: {error}") from None


def _counted(facts: ModelFacts) -> tuple[tuple[FFNSpec, int], ...]:
    """The model's different FFNs and how many layers have each."""
    counts: dict[FFNSpec, int] = {}
    for ffn in facts.ffns():
        counts[ffn] = counts.get(ffn, 0) + 1
    return tuple(counts.items())


@lru_cache(maxsize=4096)
def _slice_bytes(
    counted: tuple[tuple[FFNSpec, int], ...], hidden_size: int, element_bytes: int, num_ranks: int
) -> tuple[int, ...]:
    totals = [0] * num_ranks
    for ffn, count in counted:
        for name, shape in ffn_shapes(ffn, hidden_size).items():
            tensor = TensorSpec("weights", 0, name, shape)
            width = intermediate_width(tensor)
            parts = [None] * num_ranks if width is None else intermediate_slices(width, num_ranks)
            for rank, part in enumerate(parts):
                sliced = TensorSpec("weights", 0, name, destination_shape(tensor, part))
                totals[rank] += count * (4 if name in FLOAT32_TENSORS else element_bytes) * sliced.num_elements
    return tuple(totals)


def kv_rank_parts(
    models: Sequence[ModelFacts], bounds: StepBounds, figures: MemoryFigures, num_weights_ranks: int
) -> dict[str, int]:
    """Everything on a KV rank but its KV cache and reserve. Every model's non-FFN weights are on every KV rank."""
    widest = max(model.spec.hidden_size for model in models)
    return {
        "attention_weights": sum(model.kv_pool_weight_bytes for model in models),
        "activations": max(_attention_activation_bytes(model, bounds) for model in models),
        "logits": max(model.spec.vocab_size for model in models) * bounds.max_num_seqs * LOGIT_BYTES,
        "transfer": NUM_SLOTS * bounds.tokens_in_flight * widest * PARTIAL_SUM_BYTES * num_weights_ranks
        + _handed_bytes(models, bounds) * bounds.num_prefill_ranks,
        "graphs": figures.graph_bytes * bounds.num_decode_lanes * len(models),
        "runtime": figures.runtime_bytes,
    }


def prefill_rank_parts(
    models: Sequence[ModelFacts], cache_bytes: int, bounds: StepBounds, figures: MemoryFigures, num_kv_ranks: int
) -> dict[str, int]:
    """Everything on a prefill rank's GPU but whole models and reserve. cache_bytes: of one layer of a context."""
    return {
        "kv_cache": cache_bytes,
        "activations": max(
            _attention_activation_bytes(model, bounds) + _ffn_activation_bytes(model, bounds) for model in models
        ),
        "transfer": _handed_bytes(models, bounds) * num_kv_ranks,
        "graphs": figures.graph_bytes * len(models),
        "runtime": figures.runtime_bytes,
    }


def _handed_bytes(models: Sequence[ModelFacts], bounds: StepBounds) -> int:
    """A channel between a home and a prefill rank: a chunk's rows, or its KV of a layer, whichever is wider."""
    widest = max(max(model.spec.hidden_size, model.spec.kv_elements_per_token_layer) for model in models)
    return NUM_SLOTS * bounds.max_tokens * widest * PARTIAL_SUM_BYTES


def weights_rank_parts(
    models: Sequence[ModelFacts], slice_bytes: int, bounds: StepBounds, figures: MemoryFigures, num_kv_ranks: int
) -> dict[str, int]:
    """Everything on a weights rank but its reserve."""
    widest = max(model.spec.hidden_size * model.element_bytes for model in models)
    return {
        "ffn_weights": slice_bytes,
        "activations": max(_ffn_activation_bytes(model, bounds) for model in models),
        "transfer": NUM_SLOTS * bounds.tokens_in_flight * widest * num_kv_ranks,
        "graphs": figures.graph_bytes * bounds.num_decode_lanes * len(models),
        "runtime": figures.runtime_bytes,
    }


def _attention_activation_bytes(facts: ModelFacts, bounds: StepBounds) -> int:
    """One attention segment of the largest step: residual (float32), two normed rows, q, new k and v, output."""
    hidden = facts.spec.hidden_size
    return bounds.max_tokens * (4 * hidden + facts.element_bytes * (2 * hidden + facts.attention_row_elements))


def _ffn_activation_bytes(facts: ModelFacts, bounds: StepBounds) -> int:
    """One FFN segment of the largest step, unsliced: gate and up rows, their product, the float32 sum."""
    width = facts.ffn_row_elements
    return bounds.max_tokens * (3 * width * facts.element_bytes + 4 * facts.spec.hidden_size)
