"""Routing few tokens: expert ids and weights, and each expert's list of the tokens that chose it."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.channels.channel_map import Choices
from crosspool.backends.cuda.channels.transport_params import Meeting
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.limits import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K
from crosspool.backends.cuda.kernels.params import RouterParams, address, check
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights, RouterWeights, has_shared_gate
from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec, RouterSpec

MAX_TOKENS = 32
_THREADS = 256
_WARPS = 8
ROUTER_SMEM_BYTES = 4 * (2 * _WARPS * MAX_EXPERTS + MAX_TOKENS * _WARPS + MAX_TOKENS * 32 + MAX_EXPERTS + 1)
_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_of_topk": 2}


@dataclass(frozen=True)
class Routing:
    """What the router leaves on the device for the expert kernels; one set serves all layers in turn."""

    logits: torch.Tensor  # (tokens, experts + 1) fp32, flat use
    ticket: torch.Tensor  # (1) int32, zero between launches
    meetings: torch.Tensor  # (1) int64: arrivals of the blocks of kernels that hold the whole device
    logit_words: torch.Tensor  # (tokens, experts + 1) int64, flat use: the fused kernel's logits with their epoch
    choice_words: torch.Tensor  # (tokens, top_k, 2) int64, flat use: its choices, an id and a weight with their epoch
    shared_scale: torch.Tensor  # (tokens) fp32
    topk_ids: torch.Tensor  # (tokens * top_k) int32
    topk_weights: torch.Tensor  # (tokens * top_k) fp32
    num_unique: torch.Tensor  # (1) int32
    unique_ids: torch.Tensor  # (experts) int32, ascending
    unique_offsets: torch.Tensor  # (experts + 1) int32: where each chosen expert's pairs begin
    expert_pairs: torch.Tensor  # (tokens * top_k) int32: token * top_k + choice, grouped by expert

    @classmethod
    def allocate(cls, max_tokens: int, max_experts: int, max_top_k: int, device: torch.device) -> "Routing":
        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def floats(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.float32, device=device)

        pairs = max_tokens * max_top_k
        return cls(
            floats(max_tokens * (max_experts + 1)),
            ints(1),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(max_tokens * (max_experts + 1), dtype=torch.int64, device=device),
            torch.zeros(2 * pairs, dtype=torch.int64, device=device),
            floats(max_tokens),
            ints(pairs),
            floats(pairs),
            ints(1),
            ints(max_experts),
            ints(max_experts + 1),
            ints(pairs),
        )


def routing_rules(router: RouterSpec) -> dict[str, int | float]:
    # A softmax renormalised over the chosen needs no epsilon and no total: the same rule as softmax_of_topk.
    return {
        "score": _SCORES[router.score],
        "num_groups": router.num_groups,
        "topk_groups": router.topk_groups,
        "group_top2": router.group_score == "top2_sum",
        "renormalise": router.renormalise,
        "renormalise_eps": router.renormalise_eps,
        "scale": router.scale,
    }


def route(
    kernels: Launcher,
    weights: FFNLayerWeights,
    x: torch.Tensor,
    routing: Routing,
    *,
    overlap: bool = True,
) -> None:
    """Route `x` (tokens, hidden) bf16 by the layer's router; fp32 arithmetic."""
    params = router_params(weights.spec, weights.router, x, routing)
    rows = router_rows(weights.router)
    kernels.launch(
        "router",
        "route",
        grid=(rows, 1, 1),
        threads=_THREADS,
        smem_bytes=ROUTER_SMEM_BYTES,
        params=params,
        overlap=overlap,
    )


def router_params(
    spec: DenseFFNSpec | MoEFFNSpec,
    router: RouterWeights | None,
    x: torch.Tensor,
    routing: Routing,
    arrival: Meeting | None = None,
) -> RouterParams:
    """A layer's router on `x`, for kernels that route. Raises ValueError where they cannot."""
    if not isinstance(spec, MoEFFNSpec) or router is None:
        raise ValueError("a dense layer has no router")
    tokens, hidden = x.shape
    check("x", x, (tokens, hidden), torch.bfloat16)
    _check_limits(spec, tokens, hidden)
    return RouterParams(
        weight=address(router.weight),
        logit_bias=address(router.logit_bias),
        choice_bias=address(router.choice_bias),
        x=address(x),
        logits=address(routing.logits),
        ticket=address(routing.ticket),
        shared_scale=address(routing.shared_scale) if has_shared_gate(spec) else None,
        **_outputs(routing),
        tokens=tokens,
        experts=spec.num_experts,
        hidden=hidden,
        top_k=spec.top_k,
        **routing_rules(spec.router),
        arrival=arrival or Meeting(),
    )


def choice_params(
    weights: FFNLayerWeights, tokens: int, choices: Choices, arrival: Meeting | None = None
) -> RouterParams:
    """A router without weights: ids and weights come from elsewhere (`route: kv`), the lists are made here."""
    spec = weights.spec
    assert isinstance(spec, MoEFFNSpec)
    _check_limits(spec, tokens, weights.hidden)
    return RouterParams(
        topk_ids=choices.ids,
        topk_weights=choices.weights,
        tokens=tokens,
        experts=spec.num_experts,
        top_k=spec.top_k,
        arrival=arrival or Meeting(),
    )


def router_rows(router: RouterWeights | None) -> int:
    """Rows of a router: experts, and the shared expert's gate where there is one."""
    assert router is not None
    return int(router.weight.shape[0])


def route_lists(
    kernels: Launcher, spec: MoEFFNSpec, tokens: int, hidden: int, routing: Routing, choices: Choices | None = None
) -> None:
    """The expert lists alone, from `choices`, or from `routing.topk_ids` that came from elsewhere (`route: kv`)."""
    _check_limits(spec, tokens, hidden)
    params = RouterParams(**_outputs(routing), tokens=tokens, experts=spec.num_experts, hidden=hidden, top_k=spec.top_k)
    if choices is not None:
        params.topk_ids = choices.ids
    kernels.launch(
        "router", "route_lists", grid=(1, 1, 1), threads=_THREADS, smem_bytes=ROUTER_SMEM_BYTES, params=params
    )


def _outputs(routing: Routing) -> dict[str, int | None]:
    names = ("topk_ids", "topk_weights", "num_unique", "unique_ids", "unique_offsets", "expert_pairs")
    return {name: address(getattr(routing, name)) for name in names}


def _check_limits(spec: MoEFFNSpec, tokens: int, hidden: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens; the small-batch router takes 1 to {MAX_TOKENS}")
    if spec.num_experts > MAX_EXPERTS or spec.top_k > MAX_TOP_K or spec.router.num_groups > MAX_GROUPS or hidden % 4:
        raise ValueError(
            f"{spec.num_experts} experts, top-{spec.top_k}, {spec.router.num_groups} groups, hidden {hidden}: "
            f"at most {MAX_EXPERTS}, {MAX_TOP_K}, {MAX_GROUPS}, and a multiple of 4"
        )
