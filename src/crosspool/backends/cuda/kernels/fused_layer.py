"""One layer's FFN as blocks that hold the whole device compute it: alone (`moe_fused`) or within the FFN server."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.channels.channel_map import Choices
from crosspool.backends.cuda.channels.transport_params import Meeting
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.moe_params import WORD_VALUES, FFNScratch, moe_params
from crosspool.backends.cuda.kernels.params import FusedParams, address
from crosspool.backends.cuda.kernels.router import ROUTER_SMEM_BYTES, choice_params, router_params, router_rows
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.units import align_up, ceil_div

WARPS = 8
STAGE_BYTES = 32 * 1024  # of the block's weight streams
COLUMN_BYTES = 16 * 1024  # of a stage's activations in the down projection
STAGES = 4
FEW_STAGES = 5
"""Of weights, where activations take no room in the down projection."""
TABLE_TOKENS = 8
"""Most tokens of which every block tables the experts, pair by pair."""
SMEM_BYTES = 224 * 1024
"""What a layer may take of a block's 227 KiB: the server has words of its own."""
RED_FLOATS, OUT_STRIDE = 160, 20


@dataclass(frozen=True)
class FusedLayer:
    """The parameters, and the shared memory that a block needs on Hopper: 224 KiB and 8 bytes at most, for 32 tokens
    with 32 of 512 experts each; the server's own words still fit beside it."""

    params: FusedParams
    smem_bytes: int
    is_few: bool
    """Whether activations take no room in the down projection, and weights have a stage more."""


def fused_layer(
    weights: FFNLayerWeights,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: FFNScratch,
    arrival: Meeting | None = None,
    departure: Meeting | None = None,
    choices: Choices | None = None,
) -> FusedLayer:
    """As `ffn` takes them. A dense layer is one without a router; `choices` take the place of a layer's own."""
    moe = moe_params(weights, x, out, scratch, departure, choices)
    tokens, pairs, routing = moe.tokens, moe.tokens * moe.top_k, scratch.routing
    up_bytes, down_bytes = 2 * WARPS * ceil_div(tokens, 8) * RED_FLOATS * 4, WARPS * OUT_STRIDE * tokens * 4
    lists_bytes = (2 * pairs + 2 * moe.max_unique + 2) * 4
    values = pairs * moe.width + tokens * moe.shared_width
    has_table = 1 < tokens <= TABLE_TOKENS
    if has_table:
        down_bytes += 2 * TABLE_TOKENS * moe.max_unique * 4
    few_bytes = align_up(max(up_bytes, down_bytes, ROUTER_SMEM_BYTES), 16)
    with_values = align_up(max(few_bytes, down_bytes + 2 * values), 16)
    stages, work_bytes = FEW_STAGES, few_bytes
    if tokens <= TABLE_TOKENS and FEW_STAGES * STAGE_BYTES + with_values + lists_bytes <= SMEM_BYTES:
        moe.near_values, work_bytes = values, with_values
        moe.act_words = address(scratch.act_words) if values <= WORD_VALUES else None
    elif not has_table:
        stages, work_bytes = STAGES, align_up(max(few_bytes, down_bytes + STAGES * COLUMN_BYTES), 16)
    params = FusedParams(
        moe=moe,
        meetings=address(routing.meetings),
        logits=address(routing.logit_words),
        choices=address(routing.choice_words),
        work_bytes=work_bytes,
    )
    if choices is not None:
        params.route = choice_params(weights, tokens, choices, arrival)
    elif weights.router is None:
        params.route.arrival = arrival or Meeting()
    else:
        params.route = router_params(weights.spec, weights.router, x, routing, arrival)
        params.rows = router_rows(weights.router)
    return FusedLayer(params, stages * STAGE_BYTES + work_bytes + lists_bytes, stages == FEW_STAGES)


def launch_fused(kernels: Launcher, layer: FusedLayer) -> None:
    """Router and FFN as one kernel on every multiprocessor."""
    kernels.launch(
        "moe_fused",
        "moe_fused_few" if layer.is_few else "moe_fused",
        grid=(kernels.num_sms, 1, 1),
        threads=WARPS * 32,
        smem_bytes=layer.smem_bytes,
        params=layer.params,
        cooperative=True,
    )
