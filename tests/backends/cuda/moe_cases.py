"""Routed FFN layers of many shapes, with seeded weights."""

from __future__ import annotations

from crosspool.backends.cuda.loading.ffn_weights import pack_ffn
from crosspool.models.spec import MoEFFNSpec, RouterSpec, SharedExpertSpec
from tests.backends.cuda.drawn import draw

ROUTERS = {
    "softmax": RouterSpec(score="softmax", renormalise=True),
    "softmax_unnormalised": RouterSpec(score="softmax", scale=1.5),
    "sigmoid_bias": RouterSpec(score="sigmoid", choice_bias=True, renormalise=True, renormalise_eps=1e-20, scale=1.8),
    "groups_top2": RouterSpec(score="sigmoid", choice_bias=True, num_groups=8, topk_groups=3, renormalise=True),
    "groups_max": RouterSpec(score="softmax", num_groups=4, topk_groups=2, group_score="max"),
    "of_topk": RouterSpec(score="softmax_of_topk", logit_bias=True),
}


def moe_layer(router, *, experts=64, top_k=6, hidden=64, width=24, shared=None, seed=0, **options):
    spec = MoEFFNSpec(
        num_experts=experts,
        top_k=top_k,
        expert_intermediate_size=width,
        router=router,
        shared=None if shared is None else SharedExpertSpec(intermediate_size=shared, gated=True),
        **options,
    )
    tensors = {
        "router": draw(experts, hidden, seed=seed, std=0.3).float(),
        "expert_gate_up": draw(experts, 2 * width, hidden, seed=seed + 1, std=hidden**-0.5),
        "expert_down": draw(experts, hidden, width, seed=seed + 2, std=width**-0.5),
    }
    if router.choice_bias:
        tensors["choice_bias"] = draw(experts, seed=seed + 3, std=0.3).float()
    if router.logit_bias:
        tensors["router_bias"] = draw(experts, seed=seed + 3).float()
    if options.get("expert_bias"):
        tensors["expert_gate_up_bias"] = draw(experts, 2 * width, seed=seed + 4)
        tensors["expert_down_bias"] = draw(experts, hidden, seed=seed + 5)
    if shared is not None:
        tensors["shared_gate"] = draw(shared, hidden, seed=seed + 6, std=hidden**-0.5)
        tensors["shared_up"] = draw(shared, hidden, seed=seed + 7, std=hidden**-0.5)
        tensors["shared_down"] = draw(hidden, shared, seed=seed + 8, std=shared**-0.5)
        tensors["shared_expert_gate"] = draw(1, hidden, seed=seed + 9, std=0.2)
    return pack_ffn(spec, hidden, tensors)
