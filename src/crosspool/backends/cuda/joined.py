"""A model whose KV rank and only weights rank share a process and a GPU: both halves on one stream, with no crossing.

So runs a model that lies whole on one GPU, as in the baselines. The kernels are those of the two pools; what is left
out is what only carries rows between GPUs: slots, flags and waits.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.norm import residual_norm
from crosspool.backends.cuda.kv_rank.kv_chunk import sample_rows
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.outcome import Outcome
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.patience import Patience

JOIN_TIMEOUT_S = 600.0
JOIN_POLL_S = 0.02

_NO_CHANNELS = "the halves of a joined model meet on one stream; they have no channels"


class JoinedFFN(Protocol):
    """The FFN worker beside a KV worker. What it gives has one lane's scratch, so that lanes run at once."""

    def has(self, model: str) -> bool:
        """Whether the model's FFN is loaded."""
        ...

    @property
    def patience(self) -> Patience:
        """How long prompts step aside for decode, over all lanes."""
        ...

    def half_of(self, model: str, lane: int) -> FFNHalf: ...

    def chunks_of(self, model: str, lane: int) -> ChunkFFN: ...


def await_ffn(
    ffn: JoinedFFN, model: str, look: Callable[[], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the FFN beside is loaded too. look: called meanwhile; raises where the load was given up.

    Raises ValueError where it does not come.
    """
    until_s = time.monotonic() + JOIN_TIMEOUT_S
    while not ffn.has(model):
        look()
        if time.monotonic() > until_s:
            raise ValueError(f"the FFN of {model} did not load within {JOIN_TIMEOUT_S:g} s; see its rank's error")
        pause(JOIN_POLL_S)


class JoinedCrossing:
    """Stands where an `AttentionCrossing` does in a pass: the FFN of a layer runs in place of the wait for it."""

    def __init__(self, kernels: Launcher, ffn: FFNHalf, rows: int, hidden: int, device: torch.device) -> None:
        self._kernels, self._ffn = kernels, ffn
        self._sums = torch.empty(rows, hidden, dtype=torch.float32, device=device)

    @property
    def peer_flags(self) -> list[int]:
        return []

    def norm_put(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """normed = RMSNorm(residual): the FFN's rows."""
        residual_norm(self._kernels, residual, norm_weight, normed, eps=eps)

    def wait_norm(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """residual += the layer's FFN of normed; then normed = RMSNorm(residual)."""
        self._ffn.run(layer, normed, self._sums)
        residual_norm(self._kernels, residual, norm_weight, normed, eps=eps, partials=[self._sums])


class JoinedLink:
    """Stands where a `DeviceLink` does: open, and without memory."""

    num_bytes = 0

    @property
    def inbox(self) -> ChannelMap:
        raise TypeError(_NO_CHANNELS)

    def is_open(self) -> bool:
        return True

    def map(self) -> LinkMap:
        raise TypeError(_NO_CHANNELS)

    def close(self) -> None:
        """It holds nothing."""


class IdleInlet:
    """The weights rank's inlet: nothing ever comes, nothing is awaited."""

    def arrived(self, epoch: int) -> bool:
        return True

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError(_NO_CHANNELS)


class JoinedInlet(DeviceInlet):
    """Tells when a step has ended on the one stream, like any inlet of a device."""

    def arrived(self, epoch: int) -> bool:
        """Without a device (kernels emulated on a CPU) what is enqueued has ended."""
        return self._lane.device.type != "cuda" or super().arrived(epoch)


def joined_chunk(
    kernels: Launcher,
    make_half: Callable[[], ChunkHalf],
    ffn: ChunkFFN,
    patience: Patience,
    plan: ChunkPlan,
    batch: Batch,
    outcome: Outcome,
) -> Iterator[int]:
    """Enqueue a chunk's kernels on torch's current stream; yields a number for each layer of each piece."""
    half = make_half()
    half.embed()
    rows = max(piece.num_tokens for piece in plan.pieces)
    sums = torch.empty(rows, half.spec.hidden_size, dtype=torch.float32, device=half.residual.device)
    for layer in range(plan.num_layers):
        for piece in plan.pieces:
            half.attend(layer, piece)
            out = sums[: piece.num_tokens]
            with patience.timed(piece.num_tokens):
                ffn.run(layer, half.padded(piece), out)
            half.add(layer, piece, [out])
            yield plan.crossing(layer, piece)
    if batch.sampled:
        logits = half.logits([row.token for row in batch.sampled])
        sample_rows(kernels, logits, batch, outcome)
