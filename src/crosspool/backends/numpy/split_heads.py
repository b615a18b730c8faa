"""Attention of a model whose heads are cut over KV ranks (split `heads`): the home's side and a share's.

Every layer the home sends its normed rows to every share; each rank runs its own heads over its own part of the cache,
its columns of the output projection included, and the home adds the partial sums in the order of ranks.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from crosspool.backends.base import FloatArray, HalfStep, Inlet, LaneLinks, Outlet, Wait
from crosspool.backends.numpy.attention_gqa import GQAAttention
from crosspool.backends.numpy.attention_step import AttentionStep
from crosspool.backends.numpy.kv_cache import Arena, layer_caches
from crosspool.backends.numpy.rotary import RotaryTable
from crosspool.backends.numpy.step_rows import StepRows
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.kv_pool.split import head_bounds
from crosspool.models.spec import GQASpec, ModelSpec
from crosspool.scheduler.step import StepHeader, epoch


class HeadExchange:
    """The home's side of one step."""

    def __init__(self, step: AttentionStep, links: LaneLinks) -> None:
        self._step = step
        self._outlets = tuple(links.exchange_outlets.values())
        self._inlets = tuple(links.exchange_inlets.values())

    def attend(self, layer: int, flag: int) -> HalfStep[FloatArray]:
        """Run one layer's attention; the rows to send to the weights ranks."""
        step, half = self._step, self._step.half
        x = half.attention_input(layer, step.hidden)
        for outlet in self._outlets:
            outlet.put(layer, flag, x)
        turns = half.layer_turns(layer, step.turns)
        step.hidden += half.attention(layer)(x, turns, half.caches[layer], step.slots)
        yield Wait(self._inlets, flag)
        for inlet in self._inlets:
            step.hidden += inlet.take(layer, *x.shape)
        return half.ffn_input(layer, step.hidden)


class HeadShare:
    """A model's share on a KV rank that is not its home: its heads of every layer's attention."""

    def __init__(
        self, spec: ModelSpec, layers: Iterable[Mapping[str, FloatArray]], arena: Arena, geometry: PageGeometry
    ) -> None:
        """`spec` and `layers` are of this rank's heads alone (`share_of_heads`, `cut_heads`)."""
        self.spec = spec
        self._attention = []
        self._ropes = []
        for layer, weights in zip(spec.layers, layers, strict=True):
            assert isinstance(layer.attention, GQASpec)
            self._attention.append(GQAAttention(layer.attention, dict(weights), spec.norm_eps))
            self._ropes.append(layer.attention.rope)
        self._rotary = {rope: RotaryTable(rope) for rope in dict.fromkeys(self._ropes)}
        self._caches = layer_caches(arena, geometry, spec)
        self.nbytes = sum(attention.nbytes for attention in self._attention)

    def answers(self, rows: StepRows, header: StepHeader, inlet: Inlet, outlet: Outlet) -> HalfStep[None]:
        """Send back the partial sums of this rank's heads, layer by layer."""
        turns = {rope: table.turns(rows.slots.positions) for rope, table in self._rotary.items()}
        for layer, (attention, cache) in enumerate(zip(self._attention, self._caches, strict=True)):
            flag = epoch(header.step_seq, layer)
            yield Wait((inlet,), flag)
            x = inlet.take(layer, header.num_tokens, self.spec.hidden_size)
            outlet.put(layer, flag, attention(x, turns[self._ropes[layer]], cache, rows.slots))


def cut_heads(
    weights: Mapping[str, FloatArray], attention: GQASpec, index: int, num_ranks: int
) -> dict[str, FloatArray]:
    """One layer's tensors (`models/tensors.py`) for one rank's KV heads; what does not belong to heads stays as it is.

    The bias of the output projection is the first rank's; the others have zeros in its place.
    """
    own = head_bounds(attention.num_kv_heads, num_ranks)[index]
    cut = dict(weights)
    for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias", "sinks"):
        if name in weights:
            by_head = weights[name].reshape(attention.num_kv_heads, -1, *weights[name].shape[1:])
            cut[name] = by_head[own].reshape(-1, *weights[name].shape[1:])
    hidden = len(weights["o"])
    cut["o"] = weights["o"].reshape(hidden, attention.num_kv_heads, -1)[:, own].reshape(hidden, -1)
    if "o_bias" in weights and index > 0:
        cut["o_bias"] = np.zeros_like(weights["o_bias"])
    return cut
