"""Which models prefill in pieces. Both halves ask this of the spec alone, so they always agree.

No torch in here or in what it imports: a deployment asks it too.
"""

from crosspool.backends.cuda.chunks.chunk_plan import is_chunk
from crosspool.backends.cuda.kernels.limits import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K
from crosspool.backends.cuda.kernels.prefill_shapes import takes_shape
from crosspool.models.spec import DenseFFNSpec, ModelSpec, MoEFFNSpec
from crosspool.scheduler.step import StepHeader


def runs_in_pieces(header: StepHeader, spec: ModelSpec) -> bool:
    """Whether a step is a chunk of a model whose shapes the prefill kernels take."""
    return is_chunk(header) and has_chunk_kernels(spec)


def has_chunk_kernels(spec: ModelSpec) -> bool:
    """Whether they take the model's heads and experts; others' prompts run in passes."""
    return spec.hidden_size % 8 == 0 and all(
        takes_shape(each.attention) and _takes_ffn(each.ffn) for each in spec.layers
    )


def _takes_ffn(ffn: DenseFFNSpec | MoEFFNSpec) -> bool:
    if isinstance(ffn, DenseFFNSpec):
        return ffn.intermediate_size % 8 == 0
    shared = 0 if ffn.shared is None else ffn.shared.intermediate_size
    return (
        ffn.num_experts <= MAX_EXPERTS
        and ffn.top_k <= MAX_TOP_K
        and ffn.router.num_groups <= MAX_GROUPS
        and ffn.expert_intermediate_size % 8 == 0
        and shared % 8 == 0
    )
