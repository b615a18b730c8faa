"""What the kernels for the FFN of few tokens read: buffers between them, and their parameters."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.channels.channel_map import Choices
from crosspool.backends.cuda.channels.transport_params import Meeting
from crosspool.backends.cuda.kernels.params import MoeParams, address, check
from crosspool.backends.cuda.kernels.router import MAX_TOKENS, Routing
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.models.spec import MoEFFNSpec

OUT_FORMS = {torch.bfloat16: 0, torch.float32: 1, torch.int64: 2}
"""int64: words of an fp32 sum and its epoch."""
WORD_VALUES = 11 * 1024
"""Most activations of a layer that cross between blocks as words. Each block looks at all of them until they are whole:
with twice as many (Qwen3-30B-A3B at batch 2) that costs more than a meeting of all blocks."""
ACTIVATIONS = {"silu": 0, "gpt_oss_swiglu": 1}


@dataclass(frozen=True)
class FFNScratch:
    """Buffers between the kernels of one FFN, reused by every layer of every model that fits."""

    routing: Routing
    act: torch.Tensor  # bf16, flat: (tokens * top_k, width)
    shared_act: torch.Tensor  # bf16, flat: (tokens, shared_width)
    act_words: torch.Tensor  # int64: two activations and an epoch each, of kernels that hold the whole device

    @classmethod
    def for_layers(cls, layers: list[FFNLayerWeights], max_tokens: int, device: torch.device) -> "FFNScratch":
        moe = [layer.spec for layer in layers if isinstance(layer.spec, MoEFFNSpec)]
        top_k = max((spec.top_k for spec in moe), default=1)
        experts = max((spec.num_experts for spec in moe), default=1)
        act = max(max_tokens * top_k * layer.width for layer in layers)
        shared = max(max_tokens * layer.shared_width for layer in layers)
        return cls(
            Routing.allocate(max_tokens, experts, top_k, device),
            torch.empty(max(act, 8), dtype=torch.bfloat16, device=device),
            torch.empty(max(shared, 8), dtype=torch.bfloat16, device=device),
            torch.zeros(WORD_VALUES // 2, dtype=torch.int64, device=device),
        )


def moe_params(
    weights: FFNLayerWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: FFNScratch,
    departure: Meeting | None = None,
    choices: Choices | None = None,
) -> MoeParams:
    """x: (tokens, hidden) bf16; out: (tokens, hidden) in one of OUT_FORMS. ValueError where the kernels cannot.

    choices: of a router elsewhere, in place of `scratch.routing`'s.
    """
    tokens, hidden = x.shape
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens; the small-batch FFN takes 1 to {MAX_TOKENS}, use grouped products beyond")
    check("x", x, (tokens, weights.hidden), torch.bfloat16)
    if tuple(out.shape) != (tokens, hidden) or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)}; the kernel needs contiguous {(tokens, hidden)}")
    width, shared_width, spec = weights.width, weights.shared_width, weights.spec
    if hidden % 8 or width % 8 or shared_width % 8:
        raise ValueError(f"hidden {hidden}, widths {width} and {shared_width} must be multiples of 8")
    is_moe = isinstance(spec, MoEFFNSpec)
    top_k = spec.top_k if isinstance(spec, MoEFFNSpec) else 1
    routing = scratch.routing
    topk_weights, scales = address(routing.topk_weights), address(routing.shared_scale)
    if choices is not None:
        topk_weights, scales = choices.weights, choices.scales
    return MoeParams(
        x=address(x),
        gate_up=address(weights.gate_up),
        down=address(weights.down),
        gate_up_bias=address(weights.gate_up_bias),
        down_bias=address(weights.down_bias),
        shared_gate=address(weights.shared_gate),
        shared_up=address(weights.shared_up),
        shared_down=address(weights.shared_down),
        shared_scale=scales if weights.has_shared_gate else None,
        topk_weights=topk_weights,
        num_unique=address(routing.num_unique) if is_moe else None,
        unique_ids=address(routing.unique_ids),
        unique_offsets=address(routing.unique_offsets),
        expert_pairs=address(routing.expert_pairs),
        act=address(scratch.act),
        shared_act=address(scratch.shared_act),
        out=address(out),
        tokens=tokens,
        hidden=hidden,
        width=width,
        shared_width=shared_width,
        top_k=top_k,
        activation=ACTIVATIONS[spec.activation],
        out_form=OUT_FORMS[out.dtype],
        max_unique=min(spec.num_experts, tokens * top_k) if isinstance(spec, MoEFFNSpec) else 1,
        departure=departure or Meeting(),
    )
