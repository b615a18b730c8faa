"""The weights pool's half of one decode step: each layer's FFN on this rank's slice; it knows no peer."""

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.channels.channel_map import Choices, Rows
from crosspool.backends.cuda.channels.transport_params import Meeting
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.moe import ffn
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights


class FFNHalf:
    """One model's FFN layers on one rank, for up to `max_tokens` rows. fused: a layer with a router is one kernel."""

    def __init__(
        self, kernels: Launcher, layers: Sequence[FFNLayerWeights], max_tokens: int, *, fused: bool = False
    ) -> None:
        self._kernels, self.layers, self._fused = kernels, tuple(layers), fused
        first = self.layers[0].shared_down if self.layers[0].down is None else self.layers[0].down
        assert first is not None
        self.scratch = FFNScratch.for_layers(list(self.layers), max_tokens, first.device)

    def run(
        self,
        layer: int,
        x: torch.Tensor | Rows,
        out: torch.Tensor | Rows,
        *,
        departure: Meeting | None = None,
        choices: Choices | None = None,
    ) -> None:
        """out (tokens, hidden), fp32 or bf16 = this slice's part of the layer's FFN of x (tokens, hidden) bf16.

        departure: where `out` lies in a peer's memory, as words that carry its epoch. choices: experts that a router on
        the KV rank chose.
        """
        ffn(
            self._kernels,
            self.layers[layer],
            x,
            out,
            self.scratch,
            fused=self._fused,
            departure=departure,
            choices=choices,
        )
