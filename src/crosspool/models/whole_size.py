"""Bytes of a whole model as a prefill rank on GPUs keeps it, in host memory and in a place on its device alike.

Pure arithmetic over the spec, so that what makes room, what counts it and what plans it agree to the byte.
"""

from crosspool.models.spec import MLASpec, ModelSpec
from crosspool.models.tensors import FLOAT32_TENSORS, TensorSpec, model_tensors
from crosspool.units import MiB, align_up

ALIGNED_BYTES = 256
"""At whose multiples a tensor begins."""

GROUP_BYTES = 2 * MiB
"""At whose multiples a group begins: a huge page of host memory."""

NOT_KEPT = frozenset({"head"})
"""The home samples."""


WITH_THE_MODELS_OWN = frozenset({"input_norm"})
"""Tensors of a layer that the one before it needs, or the embedding: they come with the model's own."""


def whole_groups(spec: ModelSpec) -> dict[int | None, int]:
    """Bytes of the model's own tensors, under None and first, since a chunk needs them first; then of each layer's.

    The most they take in bfloat16, each tensor aligned: stacked ones take no more than apart. A router has a row for a
    gated shared expert and lies there once more, as three parts in bfloat16.
    """
    sizes: dict[int | None, int] = {None: 0} | {number: _zero_bias(spec, number) for number in range(spec.num_layers)}
    for tensor in model_tensors(spec):
        if tensor.name not in NOT_KEPT:
            group = None if tensor.name in WITH_THE_MODELS_OWN else tensor.layer
            sizes[group] += _tensor_bytes(tensor)
    return {group: align_up(size, GROUP_BYTES) for group, size in sizes.items()}


def whole_bytes(spec: ModelSpec) -> int:
    """Of all groups."""
    return sum(whole_groups(spec).values())


def padded(num_bytes: int) -> int:
    return align_up(num_bytes, ALIGNED_BYTES)


def _tensor_bytes(tensor: TensorSpec) -> int:
    total = padded((4 if tensor.name in FLOAT32_TENSORS else 2) * tensor.num_elements)
    if tensor.name == "router":
        rows, width = tensor.shape
        total += padded(4 * (rows + 1) * width) + padded(3 * 2 * (rows + 1) * width)
    return total


def _zero_bias(spec: ModelSpec, layer: int) -> int:
    """Of queries without a bias that are stacked with latents that have one."""
    attention = spec.layers[layer].attention
    if isinstance(attention, MLASpec) and attention.qkv_bias and attention.q_lora_rank is None:
        return padded(2 * attention.num_heads * attention.qk_head_dim)
    return 0
