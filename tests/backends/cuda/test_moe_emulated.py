"""Small-batch experts, run on the CPU, against float64 arithmetic."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.moe import ffn  # noqa: E402
from crosspool.backends.cuda.kernels.moe_params import FFNScratch  # noqa: E402
from tests.backends.cuda.decoding import relative_error  # noqa: E402
from tests.backends.cuda.drawn import CPU, ROUNDED, draw, nan  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.moe_cases import ROUTERS, moe_layer  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 9, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared": 160},
        {"expert_bias": True, "activation": "gpt_oss_swiglu"},
        {"experts": 4, "top_k": 3, "width": 264, "shared": 8},
        {"experts": 4, "top_k": 2, "width": 784, "hidden": 1056, "shared": 784},
    ],
)
def test_ffn_equals_the_sum_over_chosen_experts(tokens, options, is_fused):
    layer = moe_layer(ROUTERS["softmax_unnormalised"], **options)
    x, out = draw(tokens, layer.hidden, seed=30), nan(tokens, layer.hidden)
    scratch = FFNScratch.for_layers([layer], tokens, CPU)
    scratch.act.fill_(float("nan"))
    kernels = EmulatedKernels(num_sms=3, is_hopper=is_fused)
    ffn(kernels, layer, x, out, scratch, fused=True)
    assert any(kernel.startswith("moe_fused") for kernel, _, _ in kernels.launches) == is_fused
    ids = scratch.routing.topk_ids.view(tokens, -1)
    weights = scratch.routing.topk_weights.view(tokens, -1)
    expected = torch.stack([ffn_reference(layer, x[t], ids[t], weights[t]) for t in range(tokens)])
    assert relative_error(out, expected) < ROUNDED


@pytest.mark.parametrize(
    "options",
    [
        {"width": 264, "shared": 160},
        {"experts": 12, "top_k": 4, "width": 96},
        {"width": 784, "top_k": 3, "shared": 784},
    ],
)
@pytest.mark.parametrize(("num_sms", "is_fused"), [(3, False), (3, True), (40, True)])
def test_a_tokens_ffn_has_the_same_bits_in_every_batch(num_sms, is_fused, options):
    """By kernels that follow each other and by one that holds the device: prompts make a lane change between them.

    Of many multiprocessors, parts of the tokens go to different blocks' routers.
    """
    layer = moe_layer(ROUTERS["softmax"], **options)
    x = draw(19, layer.hidden, seed=30)

    def outputs(rows, kernels):
        out = nan(len(rows), layer.hidden)
        ffn(kernels, layer, x[rows].contiguous(), out, FFNScratch.for_layers([layer], len(rows), CPU), fused=True)
        return out

    everything = list(range(19))
    kernels = EmulatedKernels(num_sms=num_sms, is_hopper=is_fused)
    together = outputs(everything, EmulatedKernels(num_sms=3, is_hopper=False))
    for rows in ([0], [7], [18], [7, 3], everything[:8], [9, 10, 11, 12, 7, 14, 15, 16, 17], everything):
        assert torch.equal(outputs(rows, kernels), together[rows])


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (3, {"hidden": 2120, "experts": 4, "top_k": 2, "width": 24, "shared": 16}),
        (9, {"hidden": 2120, "experts": 8, "top_k": 2, "width": 24, "shared": 16}),
        (2, {"hidden": 72, "experts": 4, "top_k": 2, "width": 1048, "shared": 2120}),
        (32, {"hidden": 1056, "experts": 3, "top_k": 3, "width": 1160}),
    ],
)
def test_long_rows_and_many_activations_take_part(tokens, options):
    """Rows of several passes, half a tile at the end of a matrix, activations that no block can hold."""
    layer = moe_layer(ROUTERS["softmax"], **options)
    x = draw(tokens, layer.hidden, seed=30)
    outs = []
    for is_fused in (False, True):
        out = nan(tokens, layer.hidden)
        kernels = EmulatedKernels(num_sms=7, is_hopper=is_fused)
        ffn(kernels, layer, x, out, FFNScratch.for_layers([layer], tokens, CPU), fused=True)
        outs.append(out)
    assert torch.equal(*outs)
    assert bool(outs[0].isfinite().all())


def ffn_reference(layer, x, ids, weights):
    x = x.double()
    total = torch.zeros(len(x), dtype=torch.float64)
    for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
        gate_up = layer.gate_up[expert].double() @ x
        if layer.gate_up_bias is not None:
            gate_up = gate_up + layer.gate_up_bias[expert].double()
        output = layer.down[expert].double() @ activation(layer.spec.activation, gate_up)
        if layer.down_bias is not None:
            output = output + layer.down_bias[expert].double()
        total += weight * output
    if layer.shared_gate is not None:
        gate_up = torch.cat([layer.shared_gate, layer.shared_up]).double() @ x
        gate = torch.sigmoid(layer.router.weight[-1].double() @ x)
        total += gate * (layer.shared_down.double() @ activation("silu", gate_up))
    return total


def activation(kind, gate_up):
    gate, up = gate_up.chunk(2)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)
