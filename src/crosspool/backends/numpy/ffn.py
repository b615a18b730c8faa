"""The FFN of a layer, dense or mixture of experts, on one rank's slice of the intermediate dimension.

A slice's output is a partial sum of the layer's; with one slice it is the output. T tokens, k experts per token,
P = T x k pairs of token and expert, I the slice's width. A step of one token runs on vectors, without the axis T.
"""

import numpy as np

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.numpy.activation import activate, halve_gates
from crosspool.backends.numpy.experts import Experts, Group
from crosspool.backends.numpy.layer_router import Choices, LayerRouter
from crosspool.backends.numpy.matrices import panels, product, transposed
from crosspool.models.spec import Activation, DenseFFNSpec, MoEFFNSpec


class GatedFFN:
    """gate/up/down matrices; also the shared expert of a MoE layer."""

    def __init__(self, gate: FloatArray, up: FloatArray, down: FloatArray, activation: Activation) -> None:
        self._gate_up = panels(halve_gates(np.concatenate([gate, up]).T))
        self._down = panels(down.T)
        self._activation: Activation = activation
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: FloatArray) -> FloatArray:
        """(T, hidden) from (T, hidden), or (hidden,) from (hidden,)."""
        return product(activate(product(x, self._gate_up), self._activation), self._down)


class MoEFFN:
    """Router, routed experts, and shared experts beside them."""

    def __init__(self, spec: MoEFFNSpec, weights: dict[str, FloatArray]) -> None:
        self.spec = spec
        self.nbytes = sum(array.nbytes for array in weights.values())
        self.route = LayerRouter(spec, weights)
        self._gate_up = Experts(halve_gates(transposed(weights["expert_gate_up"])))
        self._down = Experts(weights["expert_down"].swapaxes(1, 2))
        gate_up_bias = weights.get("expert_gate_up_bias")
        self._gate_up_bias = None if gate_up_bias is None else halve_gates(gate_up_bias.copy())
        self._down_bias = weights.get("expert_down_bias")
        self._shared = None
        if spec.shared is not None:
            shared = (weights["shared_gate"], weights["shared_up"], weights["shared_down"])
            self._shared = GatedFFN(*shared, "silu")

    def __call__(self, x: FloatArray, choices: Choices | None = None) -> FloatArray:
        """(T, hidden) from (T, hidden), or (hidden,) from (hidden,). choices: of a router elsewhere; None: its own."""
        choices = choices or self.route(x)
        ids, weights = choices.ids, choices.weights
        output = self._one_token(x, ids, weights) if x.ndim == 1 else self._grouped(x, ids, weights)
        if self._shared is not None:
            shared = self._shared(x)
            if choices.scale is not None:
                shared *= choices.scale
            output += shared
        return output

    def _one_token(self, x: FloatArray, ids: IntArray, weights: FloatArray) -> FloatArray:
        """(hidden,): the chosen experts one after another, on the very matrices, then their weighted sum."""
        experts = ids.tolist()
        gate_up = self._gate_up.of_one(x, experts)
        if self._gate_up_bias is not None:
            gate_up += self._gate_up_bias[ids]
        outputs = self._down.of_each(activate(gate_up, self.spec.activation), experts)
        if self._down_bias is not None:
            outputs += self._down_bias[ids]
        summed: FloatArray = weights.dot(outputs)
        return summed

    def _grouped(self, x: FloatArray, ids: IntArray, weights: FloatArray) -> FloatArray:
        """(T, hidden): pairs sorted by expert, one matrix product per expert that any token chose."""
        pairs = ids.ravel()
        order = pairs.argsort(kind="stable")
        groups = self._groups(pairs)
        gate_up = self._gate_up.of_groups(x.take(order // ids.shape[1], axis=0), groups)
        if self._gate_up_bias is not None:
            gate_up += self._gate_up_bias[pairs[order]]
        outputs = self._down.of_groups(activate(gate_up, self.spec.activation), groups)
        if self._down_bias is not None:
            outputs += self._down_bias[pairs[order]]
        by_token = outputs.take(order.argsort(), axis=0).reshape(*ids.shape, -1)
        summed: FloatArray = np.matmul(weights[:, None], by_token)[:, 0]
        return summed

    def _groups(self, pairs: IntArray) -> list[tuple[int, Group]]:
        """Each expert that any pair chose, with its place among the sorted pairs: that of its only one, or a slice."""
        groups: list[tuple[int, Group]] = []
        start = 0
        for expert, count in enumerate(np.bincount(pairs, minlength=self.spec.num_experts).tolist()):
            if count:
                groups.append((expert, start if count == 1 else slice(start, start + count)))
                start += count
        return groups


def build_ffn(spec: DenseFFNSpec | MoEFFNSpec, weights: dict[str, FloatArray]) -> GatedFFN | MoEFFN:
    """The layer's FFN from its canonical weights, cut to one slice."""
    if isinstance(spec, MoEFFNSpec):
        return MoEFFN(spec, weights)
    return GatedFFN(weights["gate"], weights["up"], weights["down"], spec.activation)
