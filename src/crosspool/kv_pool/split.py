"""How a model's KV lies over several KV ranks: by heads, by tokens, or a sequence whole on one. Pure arithmetic.

`heads`: every rank holds its KV heads of every page. `tokens`: every page lies whole on one rank, so that attention is
partial on each and merged by log-sum-exp. `one`: a sequence lies on one rank (the rule of CrossPool, arXiv 2606.24506).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.pools_config import KVSplitChoice

KVSplit = Literal["one", "tokens", "heads"]


def choose_kv_split(spec: ModelSpec, num_ranks: int, wanted: KVSplitChoice, model: str) -> KVSplit:
    """The split that is asked for, or the best one under `auto`; `one` on one rank.

    Raises ValueError where `heads` is asked for and the model's heads cannot be cut over so many ranks.
    """
    if num_ranks == 1 or wanted == "one":
        return "one"
    obstacle = _obstacle_to_heads(spec, num_ranks)
    if wanted == "heads" and obstacle is not None:
        raise ValueError(f"kv_split is heads for {model}, {obstacle}; use kv_split tokens or auto")
    if wanted != "auto":
        return wanted
    is_even = all(_num_kv_heads(layer.attention) % num_ranks == 0 for layer in spec.layers)
    return "heads" if obstacle is None and is_even else "tokens"


def head_bounds(num_kv_heads: int, num_ranks: int) -> tuple[slice, ...]:
    """Each rank's KV heads; where they do not divide, the first ranks hold one more."""
    width, rest = divmod(num_kv_heads, num_ranks)
    starts = [idx * width + min(idx, rest) for idx in range(num_ranks + 1)]
    return tuple(slice(start, end) for start, end in pairwise(starts))


def share_of_heads(spec: ModelSpec, index: int, num_ranks: int) -> ModelSpec:
    """The model as one rank of a `heads` split runs it, with its own heads only. Rank 0 has the widest cache row."""
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.attention, GQASpec), "latent attention has no KV heads to cut"
        own = head_bounds(layer.attention.num_kv_heads, num_ranks)[index]
        num_kv_heads = own.stop - own.start
        group = layer.attention.num_heads // layer.attention.num_kv_heads
        attention = replace(layer.attention, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads)
        layers.append(replace(layer, attention=attention))
    return replace(spec, layers=tuple(layers))


def cached_spec(spec: ModelSpec, split: KVSplit, num_ranks: int) -> ModelSpec:
    """The spec whose cache rows decide the geometry of a page on every rank."""
    return share_of_heads(spec, 0, num_ranks) if split == "heads" else spec


def exchange_width(spec: ModelSpec, split: KVSplit) -> int:
    """Most elements that one token crosses with between two KV ranks, in either direction; 0 where nothing crosses."""
    if split == "one":
        return 0
    if split == "heads":
        return spec.hidden_size
    return max(max(sum(query_and_row(layer.attention)), partial_width(layer.attention)) for layer in spec.layers)


def query_and_row(attention: GQASpec | MLASpec) -> tuple[int, int]:
    """Elements of one token's queries as they are scored against cache rows, and of its cache row."""
    width = attention.head_dim if isinstance(attention, GQASpec) else attention.kv_elements_per_token
    return attention.num_heads * width, attention.kv_elements_per_token


def partial_width(attention: GQASpec | MLASpec) -> int:
    """Elements of one token's partial attention: each head's values and its log-sum-exp."""
    width = attention.head_dim if isinstance(attention, GQASpec) else attention.kv_lora_rank
    return attention.num_heads * (width + 1)


def spread_pages(num_pages: int, frames_per_page: int, room: Sequence[int]) -> tuple[int, ...] | None:
    """The rank of each page of a `tokens` sequence: always the one with most room left, so in turns among equals.

    room: frames that each rank has not promised to anyone. None if the pages do not fit.
    """
    if sum(max(0, frames) // frames_per_page for frames in room) < num_pages:
        return None
    left = list(room)
    owners = []
    for _ in range(num_pages):
        owner = left.index(max(left))
        left[owner] -= frames_per_page
        owners.append(owner)
    return tuple(owners)


def _num_kv_heads(attention: GQASpec | MLASpec) -> int:
    return attention.num_kv_heads if isinstance(attention, GQASpec) else 1


def _obstacle_to_heads(spec: ModelSpec, num_ranks: int) -> str | None:
    """Why the heads cannot be cut."""
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, MLASpec):
            return "whose latent cache has no heads"
        if attention.num_kv_heads < num_ranks:
            return f"which has {attention.num_kv_heads} KV heads for {num_ranks} KV ranks"
        if attention.qk_norm == "full":
            return "whose norm of queries and keys spans all heads"
    return None
