"""One layer's attention of a model whose heads are cut over several KV ranks (split `heads`): both sides.

The home puts its normed rows to every share; each rank runs its own heads over its own part of the cache, its columns
of the output projection included, and the home adds the partial sums in the order of ranks. The kernels are those with
which the pools meet: to a share the home is what it is to a weights rank.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.transport import AttentionCrossing, FFNCrossing
from crosspool.backends.cuda.channels.transport_params import CrossParams, Flags, Slots
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import address
from crosspool.backends.cuda.kv_frames.vmm import range_memory
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.cluster.channel import channel_bytes
from crosspool.kv_pool.backing.base import FrameRange
from crosspool.kv_pool.split import head_bounds
from crosspool.models.spec import GQASpec
from crosspool.units import align_up

_THREADS = 256

Tensors = Mapping[str, torch.Tensor]


class HeadHome:
    """The home's side of a pass of `tokens` rows with all shares, in the order of ranks."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        links: Sequence[LinkMap],
        first_peer: int,
        tokens: int,
        hidden: int,
        device: torch.device,
    ) -> None:
        """first_peer: place of the first share among the lane's peers, behind the weights ranks."""
        capacity = tokens * hidden
        # A wait names the peer by its place: in those of weights ranks stands a channel that is always up and adds 0.
        self._memory = torch.zeros(channel_bytes(capacity) + 128, dtype=torch.uint8, device=device)
        base = align_up(self._memory.data_ptr(), 128)
        first = base - self._memory.data_ptr()
        self._memory[first : first + 8].view(torch.int64).fill_(torch.iinfo(torch.int64).max)
        silent = ChannelMap(base, capacity)
        self._out = AttentionCrossing(kernels, lane, links)
        self._into = AttentionCrossing(kernels, lane, [*[LinkMap(silent, silent)] * first_peer, *links])

    def put(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """The layer's rows to the shares, normed as they are here."""
        self._out.norm_put(layer, residual, norm_weight, normed, eps)

    def add(
        self, layer: int, residual: torch.Tensor, norm_weight: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> Iterator[None]:
        """residual += the shares' partial sums, in the order of ranks; yields once before the wait for them."""
        yield
        self._into.wait_norm(layer, residual, norm_weight, normed, eps)


class HeadShare:
    """A share's side of a pass of `tokens` rows."""

    def __init__(
        self, kernels: Launcher, lane: LaneMemory, link: LinkMap, tokens: int, hidden: int, device: torch.device
    ) -> None:
        self._kernels, self._lane, self._link = kernels, lane, link
        self._crossing = FFNCrossing(kernels, lane, link)
        self._tokens, self._hidden, self._device = tokens, hidden, device

    def take(self, layer: int, normed: torch.Tensor) -> None:
        """Wait for the layer's rows, (tokens, hidden) bf16."""
        self._crossing.wait(layer)
        at = self._crossing.rows(layer, self._tokens, self._hidden).address
        found = range_memory(FrameRange(base=at, num_frames=1, frame_bytes=normed.nbytes), self._device)
        normed.copy_(found.view(torch.bfloat16).view(normed.shape))

    def put(self, layer: int, sums: torch.Tensor) -> None:
        """The layer's partial sums, (tokens, hidden) fp32, to the home."""
        params = CrossParams(
            view=self._lane.view(),
            raise_for=Flags.at([self._link.outbox.flag]),
            rows=address(sums),
            slots=Slots(self._crossing.sums(layer, self._tokens, self._hidden).address),
            row_bytes=self._hidden * 4,
            raise_layer=layer,
        )
        grid = (self._tokens, 1, 1)
        self._kernels.launch("transport", "cross", grid=grid, threads=_THREADS, smem_bytes=256, params=params)


def cut_heads(tensors: Tensors, attention: GQASpec, index: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """One layer's tensors (`models/tensors.py`) for one rank's KV heads; what does not belong to heads stays as it is.

    The bias of the output projection is the first rank's; the others have zeros in its place.
    """
    own = head_bounds(attention.num_kv_heads, num_ranks)[index]
    cut = dict(tensors)
    for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias", "sinks"):
        if name in tensors:
            by_head = tensors[name].unflatten(0, (attention.num_kv_heads, -1))
            cut[name] = by_head[own].flatten(0, 1).contiguous()
    by_head = tensors["o"].unflatten(1, (attention.num_kv_heads, -1))
    cut["o"] = by_head[:, own].flatten(1, 2).contiguous()
    if "o_bias" in tensors and index > 0:
        cut["o_bias"] = torch.zeros_like(tensors["o_bias"])
    return cut
