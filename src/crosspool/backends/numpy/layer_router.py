"""A layer's router where it runs: beside its experts, or on the KV rank (`route: kv`), so that choices cross with rows.

What crosses for a token is its row, then its expert ids, their weights, and the shared expert's scale where that is
gated: all float32, which holds every id exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.numpy.matrices import transposed
from crosspool.backends.numpy.router import route, sigmoid
from crosspool.models.spec import ModelSpec, MoEFFNSpec


@dataclass(frozen=True, slots=True)
class Choices:
    """ids and weights: (T, k) or (k,); scale of the shared expert: (T, 1) or (1,), or None where nothing gates it."""

    ids: IntArray
    weights: FloatArray
    scale: FloatArray | None

    def of(self, token: int) -> "Choices":
        """One token's, without the axis T."""
        return Choices(self.ids[token], self.weights[token], None if self.scale is None else self.scale[token])


class LayerRouter:
    """The router of one MoE layer."""

    def __init__(self, spec: MoEFFNSpec, weights: Mapping[str, FloatArray]) -> None:
        self.spec = spec
        self._router = transposed(weights["router"])
        self._router_bias = weights.get("router_bias")
        self._choice_bias = weights.get("choice_bias")
        gate = weights.get("shared_expert_gate")
        self._shared_gate = None if gate is None else transposed(gate)

    def __call__(self, x: FloatArray) -> Choices:
        """Of (T, hidden), or of one token's (hidden,)."""
        logits = x.dot(self._router)
        if self._router_bias is not None:
            logits += self._router_bias
        ids, weights = route(logits, self.spec.router, self.spec.top_k, self._choice_bias)
        return Choices(ids, weights, None if self._shared_gate is None else sigmoid(x.dot(self._shared_gate)))


class KVRouters:
    """A model's routers on its KV rank."""

    def __init__(self, spec: ModelSpec, layers: Iterable[Mapping[str, FloatArray]]) -> None:
        self._routers = [
            LayerRouter(layer.ffn, own) if isinstance(layer.ffn, MoEFFNSpec) else None
            for layer, own in zip(spec.layers, layers, strict=True)
        ]

    def joined(self, layer: int, rows: FloatArray) -> FloatArray:
        """(T, hidden) rows with their choices behind them; as they are where the layer is dense."""
        router = self._routers[layer]
        if router is None:
            return rows
        choices = router(rows[0] if len(rows) == 1 else rows)
        parts = [choices.ids, choices.weights] + ([] if choices.scale is None else [choices.scale])
        behind = [np.asarray(part, dtype=np.float32).reshape(len(rows), -1) for part in parts]
        return np.concatenate([rows, *behind], axis=1)


def choices_of(joined: FloatArray, hidden: int, spec: MoEFFNSpec) -> Choices:
    """What lies behind the rows of `joined`, (T, hidden + choices_width)."""
    top_k = spec.top_k
    ids = joined[:, hidden : hidden + top_k].astype(np.int64)
    weights = joined[:, hidden + top_k : hidden + 2 * top_k]
    scale = joined[:, hidden + 2 * top_k :] if spec.shared is not None and spec.shared.gated else None
    return Choices(ids, weights, scale)
