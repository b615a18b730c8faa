"""One layer's FFN as blocks that hold the whole device compute it: alone (`moe_fused`) or within the FFN server."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.moe_params import FFNScratch, moe_params
from crosspool.backends.cuda.params import FusedParams, address
from crosspool.backends.cuda.router import ROUTER_SMEM_BYTES, router_params, router_rows
from crosspool.backends.cuda.transport_params import Meeting
from crosspool.units import align_up, ceil_div

WARPS = 8
STAGE_BYTES = 32 * 1024  # of the block's weight streams
RED_FLOATS, OUT_STRIDE = 160, 20


@dataclass(frozen=True)
class FusedLayer:
    """The parameters, and the shared memory that a block needs on Hopper."""

    params: FusedParams
    smem_bytes: int


def fused_layer(
    weights: FFNLayerWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: FFNScratch,
    arrival: Meeting | None = None,
    departure: Meeting | None = None,
) -> FusedLayer:
    """As `ffn` takes them. A dense layer is one without a router."""
    moe = moe_params(weights, x, out, scratch, departure)
    tokens, pairs, routing = moe.tokens, moe.tokens * moe.top_k, scratch.routing
    sums_bytes = max(2 * WARPS * ceil_div(tokens, 8) * RED_FLOATS, WARPS * OUT_STRIDE * tokens) * 4
    work_bytes = align_up(max(sums_bytes, ROUTER_SMEM_BYTES), 16)
    params = FusedParams(
        moe=moe, meetings=address(routing.meetings), logits=address(routing.logit_words), work_bytes=work_bytes
    )
    if weights.router is None:
        params.route.arrival = arrival or Meeting()
    else:
        params.route = router_params(weights, x, routing, arrival)
        params.rows = router_rows(weights)
    smem_bytes = 5 * STAGE_BYTES + work_bytes + (3 * pairs + 2 * moe.max_unique + 2) * 4
    return FusedLayer(params, smem_bytes)


def launch_fused(kernels: Launcher, layer: FusedLayer) -> None:
    """Router and FFN as one kernel on every multiprocessor."""
    kernels.launch(
        "moe_fused",
        "moe_fused",
        grid=(kernels.num_sms, 1, 1),
        threads=WARPS * 32,
        smem_bytes=layer.smem_bytes,
        params=layer.params,
        cooperative=True,
    )
