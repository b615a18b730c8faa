"""A layer's FFN for a piece of a prompt, on this rank's slice: rows sorted by expert, then one product an expert."""

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.channels.channel_map import Rows
from crosspool.backends.cuda.chunks.chunk_plan import padded_rows
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.chunk_params import (
    ActivateParams,
    ChunkRouteParams,
    CombineRowsParams,
    ExpertStartsParams,
    SortRowsParams,
    TakeRowsParams,
)
from crosspool.backends.cuda.kernels.limits import MAX_EXPERTS
from crosspool.backends.cuda.kernels.moe_params import ACTIVATIONS
from crosspool.backends.cuda.kernels.params import RouterParams, address
from crosspool.backends.cuda.kernels.products import exact_parts, grouped_linear, linear, linear_fp32, linear_into
from crosspool.backends.cuda.kernels.router import ROUTER_SMEM_BYTES, routing_rules
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.models.spec import MoEFFNSpec
from crosspool.units import ceil_div

_BLOCK = 256
_ROUTER_WARPS = 8
_COPY_BLOCKS = 128


class ChunkFFN:
    """One model's FFN layers on one rank, for pieces of any number of tokens. One stream at a time may run it."""

    def __init__(
        self, kernels: Launcher, layers: Sequence[FFNLayerWeights], routers: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """routers: from `chunk_routers`, which lanes of one model share."""
        self._kernels, self.layers = kernels, tuple(layers)
        first = self.layers[0].shared_down if self.layers[0].down is None else self.layers[0].down
        assert first is not None
        self.device = first.device
        self._routers = list(chunk_routers(self.layers) if routers is None else routers)
        self._counts = torch.zeros(MAX_EXPERTS, dtype=torch.int32, device=self.device)

    def take(self, rows: Rows) -> torch.Tensor:
        """(padded tokens, hidden) bf16 in memory of our own, from where a peer puts them."""
        tokens, hidden = rows.shape
        x = torch.empty(padded_rows(tokens), hidden, dtype=torch.bfloat16, device=self.device)
        params = TakeRowsParams(rows=rows.data_ptr(), out=address(x), bytes=tokens * hidden * 2)
        self._launch("take_rows", _COPY_BLOCKS, _BLOCK, 0, params)
        return x

    def run(self, layer: int, x: torch.Tensor, out: Rows | torch.Tensor) -> None:
        """out (tokens, hidden) fp32, maybe a peer's memory = this slice's part of the layer's FFN of x bf16.

        x may have more rows than out: products run over all of them.
        """
        weights = self.layers[layer]
        tokens, hidden = out.shape
        params = CombineRowsParams(out=out.data_ptr(), hidden=hidden)
        kept: list[torch.Tensor] = []  # what `params` points to, until the launch
        if isinstance(weights.spec, MoEFFNSpec):
            kept += self._routed(layer, weights, weights.spec, x, tokens, params)
        if weights.shared_down is not None:
            kept.append(self._shared(weights, x))
            params.shared = address(kept[-1])
        self._launch("combine_rows", tokens, _BLOCK, 0, params)

    def _routed(
        self,
        layer: int,
        weights: FFNLayerWeights,
        spec: MoEFFNSpec,
        x: torch.Tensor,
        tokens: int,
        combine: CombineRowsParams,
    ) -> list[torch.Tensor]:
        """Every chosen expert's output, in the order of experts, into `combine`."""
        hidden = x.shape[1]
        pairs, router = tokens * spec.top_k, self._routers[layer]
        assert router is not None
        assert weights.router is not None
        assert weights.gate_up is not None
        assert weights.down is not None
        ints = torch.empty(4, pairs, dtype=torch.int32, device=self.device)
        ids, ranks, places, row_experts = ints.unbind()
        starts, ends = torch.empty(2, spec.num_experts, dtype=torch.int32, device=self.device).unbind()
        floats = torch.empty(pairs + tokens, dtype=torch.float32, device=self.device)
        choice_weights, shared_scale = floats[:pairs], floats[pairs:]
        parts = linear_fp32(x, router)
        rows = weights.router.weight.shape[0]
        route = RouterParams(
            logit_bias=address(weights.router.logit_bias),
            choice_bias=address(weights.router.choice_bias),
            shared_scale=address(shared_scale) if weights.has_shared_gate else None,
            topk_ids=address(ids),
            topk_weights=address(choice_weights),
            tokens=tokens,
            experts=spec.num_experts,
            hidden=hidden,
            top_k=spec.top_k,
            **routing_rules(spec.router),
        )
        params = ChunkRouteParams(
            router=route,
            parts=address(parts),
            counts=address(self._counts),
            ranks=address(ranks),
            rows=rows,
            num_parts=router.shape[0] // rows,
        )
        self._launch("chunk_route", ceil_div(tokens, _ROUTER_WARPS), _BLOCK, ROUTER_SMEM_BYTES, params)
        bounds = ExpertStartsParams(
            counts=address(self._counts), starts=address(starts), ends=address(ends), experts=spec.num_experts
        )
        self._launch("expert_starts", 1, MAX_EXPERTS, 2 * MAX_EXPERTS * 4, bounds)
        sorted_rows = torch.empty(len(x) * spec.top_k, hidden, dtype=torch.bfloat16, device=self.device)
        sort = SortRowsParams(
            x=address(x),
            ids=address(ids),
            ranks=address(ranks),
            starts=address(starts),
            sorted=address(sorted_rows),
            places=address(places),
            row_experts=address(row_experts),
            hidden=hidden,
            top_k=spec.top_k,
        )
        self._launch("sort_rows", tokens, _BLOCK, 4 * spec.top_k, sort)
        gate_up = grouped_linear(sorted_rows, weights.gate_up, ends)
        width = weights.width
        activated = self._activate(gate_up, width, width, ACTIVATIONS[spec.activation], weights, row_experts)
        down = grouped_linear(activated, weights.down, ends)
        combine.down, combine.places, combine.ids = address(down), address(places), address(ids)
        combine.weights, combine.top_k = address(choice_weights), spec.top_k
        combine.bias = address(weights.down_bias)
        combine.shared_scale = address(shared_scale) if weights.has_shared_gate else None
        return [down, ints, floats]

    def _shared(self, weights: FFNLayerWeights, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) bf16: the shared experts of a MoE layer, or a dense layer."""
        width = weights.shared_width
        assert weights.shared_gate is not None
        assert weights.shared_up is not None
        assert weights.shared_down is not None
        rows = len(x)
        gate, up = torch.empty(2, rows, width, dtype=torch.bfloat16, device=self.device).unbind()
        linear_into(x, weights.shared_gate, gate)
        linear_into(x, weights.shared_up, up)
        kind = "silu" if isinstance(weights.spec, MoEFFNSpec) else weights.spec.activation
        return linear(self._activate(gate, rows * width, width, ACTIVATIONS[kind]), weights.shared_down)

    def _activate(
        self,
        gate: torch.Tensor,
        up_offset: int,
        width: int,
        activation: int,
        weights: FFNLayerWeights | None = None,
        row_experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(rows, width) bf16 from the gate's rows, and up's so many elements behind; of rows by expert, those that have
        one."""
        out = torch.empty(gate.shape[0], width, dtype=torch.bfloat16, device=self.device)
        rows = len(out) if row_experts is None else len(row_experts)
        params = ActivateParams(
            gate=address(gate),
            bias=None if weights is None else address(weights.gate_up_bias),
            row_experts=address(row_experts),
            out=address(out),
            stride=gate.stride(0),
            up_offset=up_offset,
            rows=rows,
            width=width,
            activation=activation,
        )
        self._launch("activate_rows", ceil_div(rows * (width // 8), _BLOCK), _BLOCK, 0, params)
        return out

    def _launch(self, kernel: str, blocks: int, threads: int, smem_bytes: int, params: object) -> None:
        self._kernels.launch(
            "chunk_ffn",
            kernel,
            grid=(blocks, 1, 1),
            threads=threads,
            smem_bytes=smem_bytes,
            params=params,  # type: ignore[arg-type]
            overlap=False,
        )


def chunk_routers(layers: Sequence[FFNLayerWeights]) -> list[torch.Tensor | None]:
    """Each layer's router as bf16 parts, a few MB a model; None: a dense layer."""
    return [None if layer.router is None else exact_parts(layer.router.weight) for layer in layers]
