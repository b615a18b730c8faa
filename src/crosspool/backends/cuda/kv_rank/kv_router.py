"""A model's routers on its KV rank (`route: kv`): what they choose crosses behind the rows, in the same slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport_params import Flags, Meeting
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import RoutePutParams
from crosspool.backends.cuda.kernels.router import ROUTER_SMEM_BYTES, Routing, router_params, router_rows
from crosspool.backends.cuda.loading.ffn_weights import RouterWeights
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.models.spec import DenseFFNSpec, ModelSpec, MoEFFNSpec

_THREADS = 256

Routers = Sequence[RouterWeights | None]
"""One a layer; None where a layer is dense."""


@dataclass(frozen=True)
class KVRouter:
    """The routers of one model for one lane's passes of up to `routing`'s rows."""

    kernels: Launcher
    lane: LaneMemory
    ffns: tuple[DenseFFNSpec | MoEFFNSpec, ...]
    routers: Routers
    routing: Routing

    @classmethod
    def allocate(
        cls, kernels: Launcher, lane: LaneMemory, spec: ModelSpec, routers: Routers, max_tokens: int
    ) -> "KVRouter":
        ffns = tuple(layer.ffn for layer in spec.layers)
        moe = [ffn for ffn in ffns if isinstance(ffn, MoEFFNSpec)]
        experts, top_k = max((ffn.num_experts for ffn in moe), default=1), max((ffn.top_k for ffn in moe), default=1)
        return cls(kernels, lane, ffns, routers, Routing.allocate(max_tokens, experts, top_k, lane.device))

    def routes(self, layer: int) -> bool:
        """Whether this layer has a router, which then raises the flags behind the rows."""
        return self.routers[layer] is not None

    def put(self, layer: int, normed: torch.Tensor, links: Sequence[LinkMap]) -> None:
        """Choose experts for `normed` (tokens, hidden) bf16, tell every peer, raise the flags."""
        ffn, router = self.ffns[layer], self.routers[layer]
        assert isinstance(ffn, MoEFFNSpec)
        tokens, hidden = normed.shape
        params = RoutePutParams(
            route=router_params(ffn, router, normed, self.routing),
            departure=Meeting(view=self.lane.view(), flags=Flags.at([link.outbox.flag for link in links]), layer=layer),
        )
        for peer, link in enumerate(links):
            choices = link.outbox.choices(layer, tokens, hidden, ffn.top_k)
            params.ids[peer], params.weights[peer], params.scales[peer] = choices.ids, choices.weights, choices.scales
        self.kernels.launch(
            "router",
            "route_put",
            grid=(router_rows(router), 1, 1),
            threads=_THREADS,
            smem_bytes=ROUTER_SMEM_BYTES,
            params=params,
        )
