"""Crossings between the pools, as kernels of a lane's stream: put rows and raise flags, wait for flags, begin and end.

Attention side: norm straight into the peers' slots, then wait for every partial sum and add it in rank order. FFN
side: wait for the rows, and raise the flag behind what the FFN wrote. All of it can be captured in a graph, because
epochs are relative to a base in device memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.channels.channel_map import Choices, LinkMap, Rows
from crosspool.backends.cuda.channels.transport_params import (
    MAX_PEERS,
    BeginParams,
    CrossParams,
    EndParams,
    Flags,
    Meeting,
    NormPutParams,
    Slots,
    WaitNormParams,
)
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import address, check
from crosspool.backends.cuda.kv_rank.kv_router import KVRouter
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.records import RECORD_WORDS, RING_SLOTS

_BLOCK = 256


class AttentionCrossing:
    """The KV rank's side of one lane with the weights ranks of one model, in rank order."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        links: Sequence[LinkMap],
        *,
        takes_words: bool = False,
        router: KVRouter | None = None,
    ) -> None:
        """takes_words: the peers send sums as words where they fit, as an FFN server does, and `FFNPass` by "words".

        router: of a model whose experts are chosen here (`route: kv`).
        """
        if not 1 <= len(links) <= MAX_PEERS:
            raise ValueError(f"{len(links)} weights ranks; a KV rank crosses to 1 to {MAX_PEERS}")
        self._kernels, self._lane, self._links = kernels, lane, tuple(links)
        self._takes_words, self._router = takes_words, router

    def norm_put(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """normed = RMSNorm(residual), here and in every peer's slot. residual: (tokens, hidden) fp32; normed: bf16.

        Where the layer is routed here, its choices follow, and the flags behind both.
        """
        router = self._router if self._router is not None and self._router.routes(layer) else None
        params = NormPutParams(view=self._lane.view(), flags=Flags.at([link.outbox.flag for link in self._links]))
        tokens, hidden = residual.shape
        slots = [link.outbox.rows(layer, tokens, hidden, torch.bfloat16).address for link in self._links]
        params.raises = router is None
        self._launch("norm_put", params, slots, layer, residual, norm_weight, normed, eps)
        if router is not None:
            router.put(layer, normed, self._links)

    def wait_norm(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """Once all partial sums are here: residual += them in rank order; normed = RMSNorm(residual)."""
        params = WaitNormParams(view=self._lane.view(), flags=Flags.at([link.inbox.flag for link in self._links]))
        tokens, hidden = residual.shape
        inboxes = [link.inbox for link in self._links]
        params.are_words = self._takes_words and all(inbox.fits_words(tokens, hidden) for inbox in inboxes)
        if params.are_words:
            slots = [inbox.words(layer, tokens, hidden).address for inbox in inboxes]
        else:
            slots = [inbox.rows(layer, tokens, hidden, torch.float32).address for inbox in inboxes]
        self._launch("wait_norm", params, slots, layer, residual, norm_weight, normed, eps)

    @property
    def peer_flags(self) -> list[int]:
        """Addresses of the flags of this rank's rows, in the peers' memory."""
        return [link.outbox.flag for link in self._links]

    def _launch(
        self,
        kernel: str,
        params: NormPutParams | WaitNormParams,
        slots: Sequence[int],
        layer: int,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        normed: torch.Tensor,
        eps: float,
    ) -> None:
        tokens, hidden = residual.shape
        check("residual", residual, (tokens, hidden), torch.float32)
        check("normed", normed, (tokens, hidden), torch.bfloat16)
        check("norm_weight", norm_weight, (hidden,), torch.bfloat16)
        if hidden % 8:
            raise ValueError(f"hidden size {hidden}; rows cross in 16-byte pieces, so it must be a multiple of 8")
        params.slots = Slots(*slots)
        params.residual, params.norm_weight, params.normed = address(residual), address(norm_weight), address(normed)
        params.hidden, params.layer, params.eps = hidden, layer, eps
        smem_bytes = (32 + hidden) * 4
        self._kernels.launch(
            "transport", kernel, grid=(tokens, 1, 1), threads=_BLOCK, smem_bytes=smem_bytes, params=params
        )


@dataclass(frozen=True)
class FFNCrossing:
    """A weights rank's side of one lane with its KV rank."""

    kernels: Launcher
    lane: LaneMemory
    link: LinkMap

    def rows(self, layer: int, tokens: int, hidden: int) -> Rows:
        """Where the layer's rows lie once `wait` has ended: bf16."""
        return self.link.inbox.rows(layer, tokens, hidden, torch.bfloat16)

    def choices(self, layer: int, tokens: int, hidden: int, top_k: int) -> Choices:
        """What a router on the KV rank decided, there with the rows."""
        return self.link.inbox.choices(layer, tokens, hidden, top_k)

    def sums(self, layer: int, tokens: int, hidden: int) -> Rows:
        """Where the layer's partial sums go, in the KV rank's memory: fp32."""
        return self.link.outbox.rows(layer, tokens, hidden, torch.float32)

    def words(self, layer: int, tokens: int, hidden: int) -> Rows | None:
        """Where the layer's partial sums go as words, each with its epoch; None where they cross plainly."""
        outbox = self.link.outbox
        return outbox.words(layer, tokens, hidden) if outbox.fits_words(tokens, hidden) else None

    def epochs(self, layer: int) -> Meeting:
        """For a kernel that writes words: no flag, but the epoch that they carry."""
        return Meeting(view=self.lane.view(), layer=layer)

    def wait(self, layer: int) -> None:
        """Kernels behind this one find the layer's rows in their slot."""
        wait_for = Flags.at([self.link.inbox.flag])
        self._cross(CrossParams(view=self.lane.view(), wait_for=wait_for, wait_layer=layer))

    def signal(self, layer: int) -> None:
        """Raise the flag behind sums that earlier kernels wrote to the peer."""
        raise_for = Flags.at([self.link.outbox.flag])
        self._cross(CrossParams(view=self.lane.view(), raise_for=raise_for, raise_layer=layer))

    def arrival(self, layer: int) -> Meeting:
        """For a kernel that waits itself for the layer's rows."""
        return Meeting(view=self.lane.view(), flags=Flags.at([self.link.inbox.flag]), layer=layer)

    def departure(self, layer: int) -> Meeting:
        """For a kernel that raises the flag behind its own sums in the peer's memory."""
        return Meeting(view=self.lane.view(), flags=Flags.at([self.link.outbox.flag]), layer=layer)

    def _cross(self, params: CrossParams) -> None:
        self.kernels.launch("transport", "cross", grid=(1, 1, 1), threads=_BLOCK, smem_bytes=256, params=params)


def begin_pass(
    kernels: Launcher,
    lane: LaneMemory,
    token_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    sampling: torch.Tensor | None = None,
) -> None:
    """Take the next record of the lane's ring as the inputs given here (rows) int32; none on a weights rank."""
    params = BeginParams(
        lane=address(lane.words),
        ring=address(lane.records.memory),
        last_tokens=address(lane.last_tokens),
        token_ids=address(token_ids),
        positions=address(positions),
        lengths=address(lengths),
        sampling=address(sampling),
        rows=0 if token_ids is None else len(token_ids),
        ring_slots=RING_SLOTS,
        record_words=RECORD_WORDS,
    )
    kernels.launch("transport", "begin_pass", grid=(1, 1, 1), threads=32, smem_bytes=0, params=params, overlap=False)


def end_pass(kernels: Launcher, lane: LaneMemory, num_layers: int, tokens: torch.Tensor | None = None) -> None:
    """Tell the host that the pass has ended, with the tokens (rows) int32 it sampled, if any."""
    params = EndParams(
        view=lane.view(),
        tokens=address(tokens),
        last_tokens=address(lane.last_tokens),
        host_tokens=address(lane.host_tokens),
        rows=0 if tokens is None else len(tokens),
        ring_slots=RING_SLOTS,
        num_layers=num_layers,
    )
    kernels.launch("transport", "end_pass", grid=(1, 1, 1), threads=32, smem_bytes=0, params=params)
