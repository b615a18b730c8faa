"""FFNs against plain loops in float64: few and many tokens, every option, whole and in slices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.backends.numpy.activation import activate, halve_gates
from crosspool.backends.numpy.ffn import build_ffn
from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec, RouterSpec, SharedExpertSpec
from crosspool.models.tensors import FLOAT32_TENSORS, ffn_shapes

HIDDEN = 24

MOES = {
    "plain": MoEFFNSpec(
        num_experts=8, top_k=2, expert_intermediate_size=16, router=RouterSpec(score="softmax", renormalise=True)
    ),
    "every expert": MoEFFNSpec(num_experts=4, top_k=4, expert_intermediate_size=16, router=RouterSpec(score="softmax")),
    "shared, scaled, biased choice": MoEFFNSpec(
        num_experts=16,
        top_k=4,
        expert_intermediate_size=16,
        router=RouterSpec(score="sigmoid", choice_bias=True, renormalise=True, renormalise_eps=1e-20, scale=2.5),
        shared=SharedExpertSpec(intermediate_size=32),
    ),
    "gated shared": MoEFFNSpec(
        num_experts=8,
        top_k=2,
        expert_intermediate_size=16,
        router=RouterSpec(score="softmax"),
        shared=SharedExpertSpec(intermediate_size=32, gated=True),
    ),
    "gpt-oss": MoEFFNSpec(
        num_experts=8,
        top_k=3,
        expert_intermediate_size=16,
        router=RouterSpec(score="softmax_of_topk", logit_bias=True),
        activation="gpt_oss_swiglu",
        expert_bias=True,
    ),
}
SPECS = MOES | {
    "dense": DenseFFNSpec(intermediate_size=48),
    "dense swiglu": DenseFFNSpec(intermediate_size=48, activation="gpt_oss_swiglu"),
}


def random_weights(spec, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (3 if "gate" in name else 1) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in ffn_shapes(spec, HIDDEN).items()
    }


def sliced(weights, start, stop, width):
    """The canonical slice of every tensor: rows of gate and up, columns of down; biases of down once."""
    result = {}
    for name, array in weights.items():
        if name in FLOAT32_TENSORS or name == "shared_expert_gate":
            result[name] = array
        elif name in ("expert_gate_up", "expert_gate_up_bias"):
            result[name] = np.concatenate([array[:, start:stop], array[:, width + start : width + stop]], axis=1)
        elif name == "expert_down_bias":
            result[name] = array if start == 0 else np.zeros_like(array)
        elif name.endswith("down"):
            scale = array.shape[-1] // width
            result[name] = array[..., start * scale : stop * scale]
        else:
            scale = len(array) // width
            result[name] = array[start * scale : stop * scale]
    return result


def swiglu(gate, up, activation):
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def plain_ffn(spec, weights, x, ids, expert_weights):
    """Token by token, expert by expert."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    if isinstance(spec, DenseFFNSpec):
        return swiglu(x @ w["gate"].T, x @ w["up"].T, spec.activation) @ w["down"].T
    result = np.zeros_like(x)
    width = w["expert_gate_up"].shape[1] // 2
    for token in range(len(x)):
        for expert, weight in zip(ids[token], expert_weights[token], strict=True):
            gate_up = w["expert_gate_up"][expert] @ x[token]
            if spec.expert_bias:
                gate_up += w["expert_gate_up_bias"][expert]
            output = w["expert_down"][expert] @ swiglu(gate_up[:width], gate_up[width:], spec.activation)
            if spec.expert_bias:
                output += w["expert_down_bias"][expert]
            result[token] += weight * output
        if spec.shared is not None:
            hidden = swiglu(w["shared_gate"] @ x[token], w["shared_up"] @ x[token], "silu")
            gate = 1 / (1 + np.exp(-(w["shared_expert_gate"] @ x[token]))) if spec.shared.gated else 1
            result[token] += gate * (w["shared_down"] @ hidden)
    return result


def expected(spec, weights, x):
    ids = expert_weights = None
    if isinstance(spec, MoEFFNSpec):
        choices = build_ffn(spec, weights).route(x)
        ids, expert_weights = choices.ids, choices.weights
    return plain_ffn(spec, weights, x.astype(np.float64), ids, expert_weights)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=max(40, settings.default.max_examples // 3))
@given(seed=st.integers(0, 2**32), num_tokens=st.sampled_from([1, 2, 7, 40]))
def test_ffn_equals_the_plain_loop(name, seed, num_tokens):
    spec = SPECS[name]
    weights = random_weights(spec, seed)
    x = np.random.default_rng(seed).standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    before = x.copy()
    ffn = build_ffn(spec, weights)
    results = [ffn(x)] if num_tokens > 1 else [ffn(x), ffn(x[0])[None]]
    for result in results:
        assert result.dtype == np.float32
        assert result == pytest.approx(expected(spec, weights, x), rel=1e-4, abs=1e-4)
    assert (x == before).all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_uneven_slices_add_up_to_the_whole(name, num_tokens):
    spec = SPECS[name]
    weights = random_weights(spec, 5)
    width = spec.expert_intermediate_size if isinstance(spec, MoEFFNSpec) else spec.intermediate_size
    x = np.random.default_rng(5).standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    cut = width * 5 // 8
    slices = [build_ffn(spec, sliced(weights, *bounds, width)) for bounds in ((0, cut), (cut, width))]
    parts = [ffn(x) if num_tokens > 1 else ffn(x[0])[None] for ffn in slices]
    assert parts[0] + parts[1] == pytest.approx(expected(spec, weights, x), rel=1e-4, abs=1e-4)
    assert np.abs(parts[1]).max() > 0


def test_experts_that_nobody_chose_are_not_read():
    spec = MOES["plain"]
    weights = random_weights(spec, 6)
    x = np.random.default_rng(6).standard_normal((2, HIDDEN)).astype(np.float32)
    chosen = set(build_ffn(spec, weights).route(x).ids.ravel().tolist())
    for expert in set(range(8)) - chosen:
        weights["expert_gate_up"][expert] = np.nan
        weights["expert_down"][expert] = np.nan
    ffn = build_ffn(spec, weights)
    assert np.isfinite(ffn(x)).all()
    assert np.isfinite(ffn(x[0])).all()


def test_gpt_oss_swiglu_by_hand():
    gate_up = np.array([[10.0, -1.0, 3.0, -20.0]], dtype=np.float32)
    first = 7 / (1 + np.exp(-1.702 * 7)) * 4  # gate clamped to 7, up 3 + 1
    second = -1 / (1 + np.exp(1.702)) * (-7 + 1)  # gate is not clamped below, up clamped to -7
    assert activate(halve_gates(gate_up), "gpt_oss_swiglu")[0] == pytest.approx([first, second], rel=1e-6)


def test_silu_of_large_numbers_neither_overflows_nor_warns():
    gate_up = np.array([[-500.0, 500.0, 2.0, 2.0]], dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert activate(halve_gates(gate_up), "silu")[0] == pytest.approx([0.0, 1000.0], abs=1e-30)
