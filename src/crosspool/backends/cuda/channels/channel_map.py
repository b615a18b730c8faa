"""Where the flag and the two slots of a channel lie: the layout of `cluster/channel.py`, as device addresses."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.cluster.channel import channel_bytes
from crosspool.cluster.region import LINE_BYTES
from crosspool.units import align_up

WORDS_TOKENS = 8
"""Most rows whose sums cross as words; beyond, the doubled bytes cost more than a flag and its fences."""


@dataclass(frozen=True, slots=True)
class ChannelMap:
    """A channel as one device sees it: `base` is an address valid there, `capacity` float32 elements of a slot."""

    base: int
    capacity: int

    @property
    def num_bytes(self) -> int:
        return channel_bytes(self.capacity)

    @property
    def flag(self) -> int:
        return self.base

    def slot(self, layer: int) -> int:
        """Address of the slot of this layer's parity."""
        return self.base + LINE_BYTES + (layer & 1) * align_up(4 * self.capacity, LINE_BYTES)

    def rows(self, layer: int, tokens: int, width: int, dtype: torch.dtype) -> "Rows":
        """The slot as (tokens, width) rows. Raises ValueError where they do not fit."""
        if tokens * width > self.capacity:
            raise ValueError(
                f"{tokens} rows of width {width} do not fit a channel of {self.capacity} elements; "
                "raise max_tokens_per_step"
            )
        return Rows(self.slot(layer), (tokens, width), dtype)

    def choices(self, layer: int, tokens: int, width: int, top_k: int) -> "Choices":
        """Where a router on the KV rank leaves its choices: behind the layer's rows of bf16, in the same slot."""
        ids = self.rows(layer, tokens, width, torch.bfloat16).address + align_up(2 * tokens * width, 16)
        weights = ids + 4 * tokens * top_k
        scales = weights + 4 * tokens * top_k
        if scales + 4 * tokens > self.slot(layer) + 4 * self.capacity:
            raise ValueError(
                f"{tokens} rows of width {width} and their {top_k} experts do not fit a channel of {self.capacity} "
                "elements; set route to ffn"
            )
        return Choices(ids, weights, scales)

    def fits_words(self, tokens: int, width: int) -> bool:
        """Whether sums of this size cross as words, each with its epoch: few rows, for words take twice the bytes.

        They lie at the end of the slot, where no pass leaves plain sums: a stale one could look like an epoch.
        """
        return tokens <= WORDS_TOKENS and (2 * tokens + PASS_TOKENS) * width <= self.capacity

    def words(self, layer: int, tokens: int, width: int) -> "Rows":
        """Where (tokens, width) words lie in the slot. Raises ValueError where they do not fit."""
        if not self.fits_words(tokens, width):
            raise ValueError(
                f"{tokens} rows of width {width} do not fit a channel of {self.capacity} elements as words"
            )
        start = self.capacity // 4 * 4 - 2 * tokens * width
        return Rows(self.slot(layer) + 4 * start, (tokens, width), torch.int64)


@dataclass(frozen=True, slots=True)
class Choices:
    """Addresses of what a router decides: expert ids (tokens, top_k) int32, their weights (tokens, top_k) fp32, and the
    shared expert's scale (tokens) fp32 where it is gated."""

    ids: int
    weights: int
    scales: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Contiguous rows at an address, maybe another GPU's: as much of a tensor as a kernel launch needs."""

    address: int
    shape: tuple[int, int]
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class LinkMap:
    """Both channels of a link as one end sees them: `inbox` in its own memory, `outbox` in the peer's."""

    inbox: ChannelMap
    outbox: ChannelMap
