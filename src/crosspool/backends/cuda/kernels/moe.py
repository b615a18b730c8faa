"""The FFN of few tokens: router, then every chosen expert's weights read once, no sort and no padding."""

import torch

from crosspool.backends.cuda.channels.channel_map import Choices
from crosspool.backends.cuda.channels.transport_params import Meeting
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.fused_layer import (
    COLUMN_BYTES,
    OUT_STRIDE,
    RED_FLOATS,
    STAGE_BYTES,
    STAGES,
    WARPS,
    fused_layer,
    launch_fused,
)
from crosspool.backends.cuda.kernels.moe_params import FFNScratch, moe_params
from crosspool.backends.cuda.kernels.router import route, route_lists
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.models.spec import MoEFFNSpec
from crosspool.units import ceil_div


def ffn(
    kernels: Launcher,
    weights: FFNLayerWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: FFNScratch,
    *,
    fused: bool = False,
    overlap: bool = True,
    departure: Meeting | None = None,
    choices: Choices | None = None,
) -> None:
    """out = this slice's FFN output of `x`: a partial sum where the FFN is cut over several ranks.

    x: (tokens, hidden) bf16, already normed, tokens <= 32. out: (tokens, hidden) fp32 or bf16.
    overlap: False keeps the first kernel from starting before all that came before has ended.
    fused: one cooperative kernel in place of three, on Hopper: the same bits, sooner. It holds every multiprocessor, so
    lanes of one GPU take turns, which keeps them apart; beside other work it waits until the whole GPU is free.
    departure: `out` lies in a peer's memory; the last kernel raises the flags behind it, or writes words of its epoch.
    choices: of a router on the KV rank (`route: kv`), in place of this layer's own.
    """
    spec, routing = weights.spec, scratch.routing
    is_moe = isinstance(spec, MoEFFNSpec)
    if fused and is_moe and kernels.is_hopper:
        launch_fused(kernels, fused_layer(weights, x, out, scratch, departure=departure, choices=choices))
        return
    params = moe_params(weights, x, out, scratch, departure, choices)
    if isinstance(spec, MoEFFNSpec) and choices is not None:
        route_lists(kernels, spec, params.tokens, params.hidden, routing, choices)
    elif is_moe:
        route(kernels, weights, x, routing, overlap=overlap)
    tokens, hidden, top_k = params.tokens, params.hidden, params.top_k
    up_stages, down_stages = (STAGES, STAGES) if kernels.is_hopper else (3, 2)
    lists_bytes = (2 * params.max_unique + 1 + tokens * top_k) * 4
    tiles = params.shared_width // 8 + (params.width // 8 * params.max_unique if is_moe else 0)
    kernels.launch(
        "moe",
        "moe_gate_up",
        grid=(min(kernels.num_sms, tiles), 1, 1),
        threads=WARPS * 32,
        smem_bytes=up_stages * STAGE_BYTES + 2 * WARPS * ceil_div(tokens, 8) * RED_FLOATS * 4 + lists_bytes,
        params=params,
        overlap=overlap or is_moe,
    )
    kernels.launch(
        "moe",
        "moe_down",
        grid=(ceil_div(hidden, 16), 1, 1),
        threads=WARPS * 32,
        smem_bytes=down_stages * (STAGE_BYTES + COLUMN_BYTES) + (WARPS * OUT_STRIDE + top_k) * tokens * 4 + lists_bytes,
        params=params,
    )
