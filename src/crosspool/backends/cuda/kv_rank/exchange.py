"""One layer's attention where each of a sequence's pages lies whole on one of several KV ranks (split `tokens`).

The home makes queries and the new cache rows, puts them to the shares, attends to its own pages and merges the partial
attention of all ranks by log-sum-exp. A share keeps the rows whose pages lie on it and attends to its own pages.
"""

from collections.abc import Iterator, Sequence

import torch

from crosspool.backends.cuda.channels.channel_map import ChannelMap, LinkMap
from crosspool.backends.cuda.channels.transport_params import Flags, Slots
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_params
from crosspool.backends.cuda.kernels.attention_variants import choose_variant, key_value_dims, num_blocks, num_kv_heads
from crosspool.backends.cuda.kernels.exchange_params import ExchangePutParams, ExchangeTakeParams, MergeParams
from crosspool.backends.cuda.kernels.params import GqaInput, MlaInput, address
from crosspool.backends.cuda.kernels.rope import rope_cache
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_frames.own_pages import OwnRows
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

_ELEMENT_BYTES = 2
_THREADS = 256
_MERGE_VALUES = 128
_PUT_BLOCKS = 4
"""Blocks that copy one token's queries."""


class TokenHome:
    """The home's side of a pass of `tokens` rows with some shares, in the order of ranks."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        rows: OwnRows,
        cache: PagedCache,
        links: Sequence[LinkMap],
        first_peer: int,
        tokens: int,
    ) -> None:
        """cache: this rank's own pages. links: to the shares that have pages of these rows. first_peer: place of the
        first of them among the lane's peers, behind the weights ranks."""
        self._kernels, self._lane, self._rows, self._cache, self._links = kernels, lane, rows, cache, tuple(links)
        device = cache.frame_table.device
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        # A wait names the peer by its place: flags that are always up stand in the places of the weights ranks.
        self._up = torch.full((1,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=device)
        self._arrivals = Flags.at(
            [self._up.data_ptr()] * first_peer + [link.inbox.flag for link in self._links] if self._links else []
        )
        self._staged: dict[int, PagedCache] = {}

    def attend(
        self,
        spec: GQASpec | MLASpec,
        layer: int,
        inputs: GqaInput | MlaInput,
        out: torch.Tensor,
        scratch: AttentionScratch,
        splits: int,
        sinks: torch.Tensor | None,
    ) -> Iterator[None]:
        """out (tokens, heads, D_v) bf16 = attention over all ranks' slots; yields once before the wait for shares."""
        key_dim, value_dim = key_value_dims(spec)
        tokens, heads = len(self._numbers), spec.num_heads
        q = scratch.q[: tokens * heads * key_dim].view(tokens, heads, key_dim)
        staged = self._staged_rows(spec)
        rope_cache(self._kernels, spec, inputs, staged, 0, self._numbers, q)
        self._put(spec, layer, q, staged)
        attend_splits(self._kernels, spec, address(q) or 0, self._cache, layer, self._rows.lengths, scratch, splits)
        if self._links:
            yield
        params = MergeParams(view=self._lane.view(), wait_for=self._arrivals, sinks=address(sinks), out=address(out))
        params.parts = Slots(*(link.inbox.slot(layer) for link in self._links))
        params.num_parts = len(self._links)
        merge(self._kernels, params, scratch, (tokens, heads, value_dim), splits, layer)

    def _put(self, spec: GQASpec | MLASpec, layer: int, q: torch.Tensor, staged: PagedCache) -> None:
        tokens = len(q)
        row_bytes = spec.kv_elements_per_token * _ELEMENT_BYTES
        params = ExchangePutParams(
            view=self._lane.view(),
            flags=Flags.at([link.outbox.flag for link in self._links]),
            slots=Slots(*(queries_at(link.outbox, spec, layer, tokens) for link in self._links)),
            q=address(q),
            rows=address(staged.frames),
            cache=self._cache.view(layer),
            own_slots=address(self._rows.slots),
            tokens=tokens,
            q_bytes=q[0].nbytes,
            row_bytes=row_bytes,
            layer=layer,
        )
        grid = (_PUT_BLOCKS, tokens, 1)
        self._kernels.launch("exchange", "exchange_put", grid=grid, threads=_THREADS, smem_bytes=0, params=params)

    def _staged_rows(self, spec: GQASpec | MLASpec) -> PagedCache:
        """A cache of one page whose slot t takes the row of token t, wherever it goes from there."""
        elements, tokens = spec.kv_elements_per_token, len(self._numbers)
        if elements not in self._staged:
            device = self._numbers.device
            geometry = PageGeometry(
                num_layers=1,
                elements_per_token_layer=elements,
                element_bytes=_ELEMENT_BYTES,
                page_tokens=tokens,
                frame_bytes=tokens * elements * _ELEMENT_BYTES,
            )
            frames = torch.zeros(1, geometry.frame_bytes, dtype=torch.uint8, device=device)
            table = torch.zeros(tokens, 1, 1, dtype=torch.int32, device=device)
            self._staged[elements] = PagedCache(frames=frames, frame_table=table, geometry=geometry)
        return self._staged[elements]


class TokenShare:
    """A share's side of a pass of `tokens` rows."""

    def __init__(
        self, kernels: Launcher, lane: LaneMemory, rows: OwnRows, cache: PagedCache, link: LinkMap, tokens: int
    ) -> None:
        self._kernels, self._lane, self._rows, self._cache = kernels, lane, rows, cache
        self._link, self._tokens = link, tokens

    def answer(self, spec: GQASpec | MLASpec, layer: int, scratch: AttentionScratch, splits: int) -> None:
        """Wait for the home's queries, keep the rows that belong here, and put partial attention to the home."""
        key_dim, value_dim = key_value_dims(spec)
        tokens, heads = self._tokens, spec.num_heads
        at = queries_at(self._link.inbox, spec, layer, tokens)
        params = ExchangeTakeParams(
            view=self._lane.view(),
            flags=Flags.at([self._link.inbox.flag]),
            rows=at + tokens * heads * key_dim * _ELEMENT_BYTES,
            cache=self._cache.view(layer),
            own_slots=address(self._rows.slots),
            row_bytes=spec.kv_elements_per_token * _ELEMENT_BYTES,
            layer=layer,
        )
        grid = (tokens, 1, 1)
        self._kernels.launch("exchange", "exchange_take", grid=grid, threads=_THREADS, smem_bytes=0, params=params)
        attend_splits(self._kernels, spec, at, self._cache, layer, self._rows.lengths, scratch, splits)
        part = self._link.outbox.rows(layer, tokens, heads * (value_dim + 1), torch.float32)
        found = MergeParams(view=self._lane.view(), part=part.address)
        found.raise_for = Flags.at([self._link.outbox.flag])
        merge(self._kernels, found, scratch, (tokens, heads, value_dim), splits, layer)


def queries_at(channel: ChannelMap, spec: GQASpec | MLASpec, layer: int, tokens: int) -> int:
    """Where the queries of a pass lie in a share's memory, cache rows behind them. Raises ValueError if too many."""
    key_dim, _ = key_value_dims(spec)
    width = spec.num_heads * key_dim + spec.kv_elements_per_token
    return channel.rows(layer, tokens, width, torch.bfloat16).address


def attend_splits(
    kernels: Launcher,
    spec: GQASpec | MLASpec,
    q: int,
    cache: PagedCache,
    layer: int,
    lengths: torch.Tensor,
    scratch: AttentionScratch,
    splits: int,
) -> None:
    """Partial results in `scratch` of queries that lie ready at `q` over each token's first `lengths` slots."""
    variant, kv_heads = choose_variant(spec), num_kv_heads(spec)
    parts = spec.num_heads if variant is None else kv_heads * ceil_div(spec.num_heads // kv_heads, variant.heads)
    blocks = min(splits, num_blocks(spec, len(lengths), kernels.num_sms))
    kernels.launch(
        "attention",
        "attention_any" if variant is None else variant.ready_name,
        grid=(parts, blocks, len(lengths)),
        threads=32 if variant is None else variant.warps * 32,
        smem_bytes=key_value_dims(spec)[1] * 4 if variant is None else variant.shared_bytes(len(lengths)),
        params=attention_params(kernels, spec, cache, layer, lengths, scratch, splits, q),
    )


def merge(
    kernels: Launcher,
    params: MergeParams,
    scratch: AttentionScratch,
    shape: tuple[int, int, int],
    splits: int,
    layer: int,
) -> None:
    """Merge this rank's splits, and the parts that `params` names; shape: (tokens, heads, value_dim)."""
    params.tokens, params.heads, params.value_dim = shape
    params.partial_o, params.partial_ml = address(scratch.partial_o), address(scratch.partial_ml)
    params.splits, params.layer = splits, layer
    kernels.launch(
        "exchange",
        "exchange_merge",
        grid=(ceil_div(shape[2], _MERGE_VALUES), shape[1], shape[0]),
        threads=_THREADS,
        smem_bytes=(_THREADS // 32 * _MERGE_VALUES + splits + params.num_parts) * 4,
        params=params,
    )
