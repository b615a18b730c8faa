"""The FFN of a layer, dense or mixture of experts, on one rank's slice of the intermediate dimension.

A slice's output is a partial sum of the layer's; with one slice it is the output. T tokens, k experts per token,
P = T x k pairs of token and expert, I the slice's width.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.matrices import transposed
from crosspool.backends.numpy.router import IntArray, route, sigmoid
from crosspool.models.spec import Activation, DenseFFNSpec, MoEFFNSpec

GPT_OSS_ALPHA = np.float32(1.702)
GPT_OSS_LIMIT = np.float32(7.0)

SAFE_EXPONENT = np.float32(88.0)
"""exp of more overflows float32; x * sigmoid(x) is below 1e-36 there."""


class GatedFFN:
    """gate/up/down matrices; also the shared expert of a MoE layer."""

    def __init__(self, gate: FloatArray, up: FloatArray, down: FloatArray, activation: Activation) -> None:
        self._gate_up = transposed(np.concatenate([gate, up]))
        self._down = transposed(down)
        self._activation: Activation = activation
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: FloatArray) -> FloatArray:
        """(T, hidden) from (T, hidden)."""
        output: FloatArray = np.dot(activate(np.dot(x, self._gate_up), self._activation), self._down)
        return output


class MoEFFN:
    """Router, routed experts, and shared experts beside them."""

    def __init__(self, spec: MoEFFNSpec, weights: dict[str, FloatArray]) -> None:
        self.spec = spec
        self.nbytes = sum(array.nbytes for array in weights.values())
        self._router = transposed(weights["router"])
        self._router_bias = weights.get("router_bias")
        self._choice_bias = weights.get("choice_bias")
        self._gate_up = list(transposed(weights["expert_gate_up"]))
        self._down = list(transposed(weights["expert_down"]))
        self._gate_up_bias = weights.get("expert_gate_up_bias")
        self._down_bias = weights.get("expert_down_bias")
        self._shared = None
        if spec.shared is not None:
            shared = (weights["shared_gate"], weights["shared_up"], weights["shared_down"])
            self._shared = GatedFFN(*shared, "silu")
        gate = weights.get("shared_expert_gate")
        self._shared_expert_gate = None if gate is None else transposed(gate)

    def __call__(self, x: FloatArray) -> FloatArray:
        """(T, hidden) from (T, hidden)."""
        ids, weights = self.route(x)
        output = self._one_token(x, ids, weights) if len(x) == 1 else self._grouped(x, ids, weights)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_expert_gate is not None:
                shared *= sigmoid(np.dot(x, self._shared_expert_gate))
            output += shared
        return output

    def route(self, x: FloatArray) -> tuple[IntArray, FloatArray]:
        """Expert ids and weights, both (T, k)."""
        logits = np.dot(x, self._router)
        if self._router_bias is not None:
            logits += self._router_bias
        return route(logits, self.spec.router, self.spec.top_k, self._choice_bias)

    def _one_token(self, x: FloatArray, ids: IntArray, weights: FloatArray) -> FloatArray:
        """(1, hidden): the chosen experts one after another, their weights applied before the down projection."""
        experts = ids[0].tolist()
        gate_up = np.concatenate([np.dot(x, self._gate_up[expert]) for expert in experts])
        if self._gate_up_bias is not None:
            gate_up += self._gate_up_bias[ids[0]]
        activated = activate(gate_up, self.spec.activation)
        activated *= weights.T
        output: FloatArray = np.dot(activated[:1], self._down[experts[0]])
        for idx in range(1, len(experts)):
            output += np.dot(activated[idx : idx + 1], self._down[experts[idx]])
        if self._down_bias is not None:
            output += np.dot(weights, self._down_bias[ids[0]])
        return output

    def _grouped(self, x: FloatArray, ids: IntArray, weights: FloatArray) -> FloatArray:
        """(T, hidden): pairs sorted by expert, one matrix product per expert that any token chose."""
        pairs = ids.ravel()
        order = pairs.argsort(kind="stable")
        experts = pairs[order]
        rows = x[order // ids.shape[1]]
        starts = [0, *(np.flatnonzero(experts[1:] != experts[:-1]) + 1).tolist()]
        groups = list(zip(experts[starts].tolist(), starts, [*starts[1:], len(pairs)], strict=True))
        gate_up = np.empty((len(pairs), self._gate_up[0].shape[1]), dtype=np.float32)
        for expert, start, stop in groups:
            np.dot(rows[start:stop], self._gate_up[expert], out=gate_up[start:stop])
        if self._gate_up_bias is not None:
            gate_up += self._gate_up_bias[experts]
        activated = activate(gate_up, self.spec.activation)
        pair_weights = weights.ravel()[order][:, None]
        activated *= pair_weights
        outputs = np.empty((len(pairs), x.shape[1]), dtype=np.float32)
        for expert, start, stop in groups:
            np.dot(activated[start:stop], self._down[expert], out=outputs[start:stop])
        if self._down_bias is not None:
            outputs += self._down_bias[experts] * pair_weights
        unsorted = np.empty_like(outputs)
        unsorted[order] = outputs
        summed: FloatArray = np.add.reduce(unsorted.reshape(*ids.shape, -1), axis=1)
        return summed


def activate(gate_up: FloatArray, activation: Activation) -> FloatArray:
    """(P, I) from [gate | up] (P, 2I): `silu(gate) * up`, or gpt-oss's clamped swiglu. Overwrites `gate_up`."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if activation == "silu":
        damped = np.minimum(-gate, SAFE_EXPONENT)
    else:
        np.minimum(gate, GPT_OSS_LIMIT, out=gate)
        np.clip(up, -GPT_OSS_LIMIT, GPT_OSS_LIMIT, out=up)
        up += 1
        damped = np.minimum(gate * -GPT_OSS_ALPHA, SAFE_EXPONENT)
    np.exp(damped, out=damped)
    damped += 1
    up *= gate
    return np.divide(up, damped, out=damped)


def build_ffn(spec: DenseFFNSpec | MoEFFNSpec, weights: dict[str, FloatArray]) -> GatedFFN | MoEFFN:
    """The layer's FFN from its canonical weights, cut to one slice."""
    if isinstance(spec, MoEFFNSpec):
        return MoEFFN(spec, weights)
    return GatedFFN(weights["gate"], weights["up"], weights["down"], spec.activation)
