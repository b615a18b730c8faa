"""The FFN of few tokens: router, then every chosen expert's weights read once, no sort and no padding."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import FusedParams, MoeParams, address, check
from crosspool.backends.cuda.router import (
    MAX_TOKENS,
    ROUTER_SMEM_BYTES,
    Routing,
    route,
    router_params,
    router_rows,
)
from crosspool.backends.cuda.transport_params import Meeting
from crosspool.models.spec import MoEFFNSpec
from crosspool.units import align_up, ceil_div

_WARPS = 8
_STAGE_BYTES = 32 * 1024  # of either kernel
_RED_FLOATS, _OUT_STRIDE = 160, 20
_ACTIVATIONS = {"silu": 0, "gpt_oss_swiglu": 1}


@dataclass(frozen=True)
class FFNScratch:
    """Buffers between the kernels of one FFN, reused by every layer of every model that fits."""

    routing: Routing
    act: torch.Tensor  # bf16, flat: (tokens * top_k, width)
    shared_act: torch.Tensor  # bf16, flat: (tokens, shared_width)

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
        )


def ffn(
    kernels: Launcher,
    weights: FFNLayerWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: FFNScratch,
    *,
    routed: bool = False,
    fused: bool = False,
    overlap: bool = True,
    arrival: Meeting | None = None,
    departure: Meeting | None = None,
) -> None:
    """out = this slice's FFN output of `x`: a partial sum where the FFN is cut over several ranks.

    x: (tokens, hidden) bf16, already normed, tokens <= 32. out: (tokens, hidden) fp32 or bf16.
    routed: `scratch.routing` already holds ids, weights and lists. overlap: False keeps the first kernel from starting
    before all that came before has ended. arrival: a router layer waits itself for the rows that a peer puts to `x`.
    fused: one cooperative kernel in place of three, on Hopper. NOTE: so far run on the emulator alone, hence off.
    departure: the last kernel raises the flags behind `out`, which lies in a peer's memory.
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
    is_fused = fused and is_moe and not routed and kernels.is_hopper
    if is_moe and not routed and not is_fused:
        route(kernels, weights, x, scratch.routing, overlap=overlap, arrival=arrival)
    elif arrival is not None and not is_fused:
        raise ValueError("only a router waits for its rows; let a kernel of its own wait before this layer")
    routing = scratch.routing
    params = MoeParams(
        x=address(x),
        gate_up=address(weights.gate_up),
        down=address(weights.down),
        gate_up_bias=address(weights.gate_up_bias),
        down_bias=address(weights.down_bias),
        shared_gate=address(weights.shared_gate),
        shared_up=address(weights.shared_up),
        shared_down=address(weights.shared_down),
        shared_scale=address(routing.shared_scale) if weights.has_shared_gate else None,
        topk_weights=address(routing.topk_weights),
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
        activation=_ACTIVATIONS[spec.activation],
        out_is_float=out.dtype == torch.float32,
        max_unique=min(spec.num_experts, tokens * top_k) if isinstance(spec, MoEFFNSpec) else 1,
        departure=departure or Meeting(),
    )
    if is_fused:
        _launch_fused(kernels, weights, x, params, routing, arrival)
        return
    stream_bytes = _STAGE_BYTES * (5 if kernels.is_hopper else 3)
    lists_bytes = (2 * params.max_unique + 1 + 2 * tokens * top_k) * 4
    tiles = shared_width // 8 + (width // 8 * params.max_unique if is_moe else 0)
    kernels.launch(
        "moe",
        "moe_gate_up",
        grid=(min(kernels.num_sms, tiles), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=stream_bytes + 2 * _WARPS * ceil_div(tokens, 8) * _RED_FLOATS * 4 + lists_bytes,
        params=params,
        overlap=overlap or (is_moe and not routed),
    )
    kernels.launch(
        "moe",
        "moe_down",
        grid=(ceil_div(hidden, 16), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=stream_bytes + (_WARPS * _OUT_STRIDE + top_k) * tokens * 4 + lists_bytes,
        params=params,
    )


def _launch_fused(
    kernels: Launcher,
    weights: FFNLayerWeights,
    x: torch.Tensor,
    moe: MoeParams,
    routing: Routing,
    arrival: Meeting | None,
) -> None:
    """Router and FFN as one kernel on every multiprocessor."""
    tokens, pairs = moe.tokens, moe.tokens * moe.top_k
    sums_bytes = max(2 * _WARPS * ceil_div(tokens, 8) * _RED_FLOATS, _WARPS * _OUT_STRIDE * tokens) * 4
    work_bytes = align_up(max(sums_bytes, ROUTER_SMEM_BYTES), 16)
    params = FusedParams(
        route=router_params(weights, x, routing, arrival),
        moe=moe,
        meetings=address(routing.meetings),
        logits=address(routing.logit_words),
        rows=router_rows(weights),
        work_bytes=work_bytes,
    )
    kernels.launch(
        "moe_fused",
        "moe_fused",
        grid=(kernels.num_sms, 1, 1),
        threads=_WARPS * 32,
        smem_bytes=5 * _STAGE_BYTES + work_bytes + (3 * pairs + 2 * moe.max_unique + 2) * 4,
        params=params,
        cooperative=True,
    )
