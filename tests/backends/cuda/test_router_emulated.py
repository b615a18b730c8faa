"""Routers and lists of experts, run on the CPU, against the NumPy backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.router import Routing, route, route_lists  # noqa: E402
from crosspool.backends.numpy.router import route as numpy_route  # noqa: E402
from tests.backends.cuda.drawn import CPU, draw  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.moe_cases import ROUTERS, moe_layer  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_and_weighs_as_numpy_does(name, tokens):
    layer = moe_layer(ROUTERS[name])
    spec, x = layer.spec, draw(tokens, 64, seed=20)
    routing = Routing.allocate(tokens, spec.num_experts, spec.top_k, CPU)
    route(EmulatedKernels(), layer, x, routing)
    logits = (x.float() @ layer.router.weight.T).numpy()
    if layer.router.logit_bias is not None:
        logits = logits + layer.router.logit_bias.numpy()
    bias = None if layer.router.choice_bias is None else layer.router.choice_bias.numpy()
    ids, weights = numpy_route(logits, spec.router, spec.top_k, bias)
    np.testing.assert_array_equal(routing.topk_ids.view(tokens, -1).numpy(), ids)
    np.testing.assert_allclose(routing.topk_weights.view(tokens, -1).numpy(), weights, rtol=1e-5)
    assert_lists(routing, ids)
    assert routing.ticket.item() == 0


@pytest.mark.parametrize("experts", [64, 130])
def test_of_equal_experts_the_lowest_are_chosen(experts):
    """Two of every three experts share the best logit, within a lane's neighbours and across lanes."""
    layer = moe_layer(ROUTERS["softmax"], experts=experts)
    best = layer.router.weight[0].clone()
    for expert in range(experts):
        layer.router.weight[expert] = best * (1.0 if expert % 3 == 1 else 2.0)
    routing = Routing.allocate(1, experts, 6, CPU)
    route(EmulatedKernels(), layer, best.bfloat16().unsqueeze(0), routing)
    assert routing.topk_ids[:6].tolist() == [0, 2, 3, 5, 6, 8]


def assert_lists(routing, ids):
    unique = np.unique(ids)
    assert routing.num_unique.item() == len(unique)
    np.testing.assert_array_equal(routing.unique_ids[: len(unique)].numpy(), unique)
    np.testing.assert_array_equal(routing.expert_pairs[: ids.size].numpy(), ids.ravel().argsort(kind="stable"))
    starts = np.searchsorted(np.sort(ids.ravel()), unique)
    np.testing.assert_array_equal(routing.unique_offsets[: len(unique) + 1].numpy(), [*starts, ids.size])


def test_lists_can_be_made_from_ids_that_came_from_elsewhere():
    spec = moe_layer(ROUTERS["softmax"]).spec
    routing = Routing.allocate(3, 64, 6, CPU)
    ids = np.array([[3, 9, 63, 0, 5, 6], [9, 3, 1, 2, 40, 41], [63, 9, 7, 8, 10, 11]])
    routing.topk_ids.copy_(torch.from_numpy(ids.ravel()))
    route_lists(EmulatedKernels(), spec, 3, 64, routing)
    assert_lists(routing, ids)


@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_lists_of_ids_that_nobody_sent_name_known_experts_and_pairs(tokens):
    """Rows that were given up: what lies in their slot may name one expert several times, or none at all."""
    spec = moe_layer(ROUTERS["softmax"]).spec
    routing = Routing.allocate(tokens, 64, 6, CPU)
    for ids in (torch.zeros(tokens * 6), torch.tensor([5, 9, 5, 1 << 20, -1, 9]).repeat(tokens)):
        for lists in (routing.unique_ids, routing.unique_offsets, routing.expert_pairs):
            lists.fill_(1 << 30)
        routing.topk_ids.copy_(ids)
        route_lists(EmulatedKernels(), spec, tokens, 64, routing)
        unique = routing.num_unique.item()
        offsets = routing.unique_offsets[: unique + 1].tolist()
        assert set(routing.unique_ids[:unique].tolist()) == {int(i) if 0 <= i < 64 else 0 for i in ids.tolist()}
        assert offsets[0] == 0
        assert all(begin < end for begin, end in itertools.pairwise(offsets))
        pairs = routing.expert_pairs[: offsets[-1]].tolist()
        assert all(0 <= pair < tokens * 6 for pair in pairs)
        assert len(set(pairs)) == len(pairs)
