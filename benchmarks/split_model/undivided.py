"""Both halves of a model on one device, with no pool between them: what split execution is compared with."""

from collections.abc import Iterator

import torch

from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf


class UndividedDecoder:
    """One decode step: `step()` runs on whatever the attention half's inputs hold, so it can be captured in a graph."""

    def __init__(self, attention: AttentionHalf, slices: list[FFNHalf]) -> None:
        self.attention, self._slices = attention, slices
        self._partials = [torch.empty_like(attention.residual) for _ in slices]

    def step(self) -> torch.Tensor:
        """(tokens, vocabulary) fp32 logits."""
        for _ in self.layers():
            pass
        return self.attention.logits()

    def layers(self) -> Iterator[torch.Tensor]:
        """Run the layers; yields the residual stream (tokens, hidden) fp32 after each."""
        self.attention.embed()
        for layer in range(self.attention.spec.num_layers):
            rows = self.attention.attend(layer)
            for half, partial in zip(self._slices, self._partials, strict=True):
                half.run(layer, rows, partial)
            self.attention.add(layer, self._partials)
            yield self.attention.residual
