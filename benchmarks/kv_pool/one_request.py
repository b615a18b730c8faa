"""One sequence that holds the whole KV pool of a GPU: attention over it, checked page by page and against float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from benchmarks.bench_attention import KINDS
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import replay_us
from benchmarks.kv_pool.cache_attention import CacheAttention, layer_parts
from benchmarks.report import Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.attention_variants import key_value_dims
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.kv_pool.pool import KVPool
from crosspool.models.spec import MLASpec

PAGES_AT_ONCE = 64
COPY_TB_PER_S = 4.25
MAX_ERROR = 0.02
"""Of bf16 attention, of the largest value; values are N(0, 1)."""

MAX_COUNT_ERROR = 0.012
"""Of the weight of a group of pages: scores and outputs are rounded to bf16. A page less is 2 % or more of a group."""


def one_request(report: Report, kernels: DeviceKernels, arena: torch.Tensor, pool: KVPool, kind: str) -> None:
    """arena: (frames, frame_bytes) uint8, seeded: the frames of `pool`, which holds nothing else.

    The request takes every page that the pool has for its model, and gives them back at the end.
    """
    name = KINDS[kind]
    spec = full_spec(name)
    frame_bytes = arena.shape[1]
    geometry = page_geometry(spec, page_tokens=choose_page_tokens(spec, frame_bytes), frame_bytes=frame_bytes)
    pool.add_model(name, geometry.frames_per_page)
    pages = pool.allocate(name, pool.budget // geometry.frames_per_page)
    assert pages is not None, "an idle pool has its whole budget free"
    share = pool.used(name) / pool.budget
    tokens = len(pages) * geometry.page_tokens
    table = torch.from_numpy(np.array([pages], dtype=np.int32)).cuda()
    cache = PagedCache(frames=arena, frame_table=table, geometry=geometry)
    attention = CacheAttention(kernels, spec.layers[-1].attention, tokens)
    worst = 0.0
    for layer in (0, spec.num_layers // 2, spec.num_layers - 1):
        got = attention.outputs(cache, layer)[0].float()
        wanted = reference(attention, cache, layer)
        worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
    times = replay_us(attention.layers(cache, spec.num_layers, spec.num_layers), units=1, replays=10)
    counted, control = coverage(attention, cache, spec.num_layers - 1)
    print(f"{name}: {tokens} tokens, {share:.4f} of the budget, error {worst:.5f}, pages {counted:.5f}", flush=True)
    pool.free(name, pages)
    pool.remove_model(name)
    assert worst < MAX_ERROR, f"attention over {tokens} tokens is wrong by {worst}"
    assert counted < MAX_COUNT_ERROR < control, (
        f"pages count {counted} wrong, {control} with one page taken for another"
    )
    report.metric(f"one_request_tokens.{name}.1+0", tokens, note="attention alone, all layers")
    report.metric(f"one_request_share.{name}.1+0", share, limit=1.0, note="of the pool's budget; asked for: 0.95")
    report.metric(f"one_request_error.{name}", worst, limit=0.0, note="largest difference from float32, three layers")
    report.metric(f"one_request_page_error.{name}", counted, limit=0.0, note=f"{control:.3f} with a page left out")
    floor_us = tokens * spec.kv_bytes_per_token("bfloat16") / COPY_TB_PER_S / 1e6
    report.samples(f"one_request_attention_us.{name}", times, limit=floor_us, note=f"bytes at {COPY_TB_PER_S} TB/s")


def reference(attention: CacheAttention, cache: PagedCache, layer: int) -> torch.Tensor:
    """(heads, value_dim) float32: softmax over all slots, some pages at a time. The last slot is the kernel's."""
    spec = attention.spec
    key_dim, value_dim = key_value_dims(spec)
    query = attention.query(cache, layer)
    heads = spec.num_heads
    most = torch.full((heads, 1), -torch.inf, device="cuda")
    total, sums = torch.zeros(heads, 1, device="cuda"), torch.zeros(heads, value_dim, device="cuda")
    frames = cache.frames.view(torch.bfloat16)
    for first in range(0, cache.frame_table.shape[1], PAGES_AT_ONCE):
        found, part = layer_parts(cache, layer, slice(first, first + PAGES_AT_ONCE))
        rows = frames[found, part].float().view(-1, spec.kv_elements_per_token)
        if isinstance(spec, MLASpec):
            keys, values = rows[None, :, :key_dim], rows[None, :, :value_dim]
        else:
            split = rows.view(-1, 2, spec.num_kv_heads, spec.head_dim)
            keys, values = split[:, 0].transpose(0, 1), split[:, 1].transpose(0, 1)
        grouped = query.view(len(keys), heads // len(keys), key_dim)
        scores = torch.matmul(grouped, keys.transpose(1, 2)).reshape(heads, -1) * spec.softmax_scale
        peak = torch.maximum(most, scores.amax(1, keepdim=True))
        weights, scale = (scores - peak).exp(), (most - peak).exp()
        total = total * scale + weights.sum(1, keepdim=True)
        attended = torch.matmul(weights.view(len(keys), heads // len(keys), -1), values).reshape(heads, value_dim)
        sums = sums * scale + attended
        most = peak
    return sums / total


def coverage(attention: CacheAttention, cache: PagedCache, layer: int) -> tuple[float, float]:
    """How far any group of pages is from its weight, in groups of even weight; the same with one page left out.

    Page p's values are a one in dimension p mod value_dim, so an output dimension counts the pages of its group: a page
    that is skipped, or read twice, shows. Keys are zero (GQA) or that same one (MLA), so weights are known.
    """
    spec, geometry = attention.spec, cache.geometry
    _, value_dim = key_value_dims(spec)
    frames, num_pages = cache.frames.view(torch.bfloat16), cache.frame_table.shape[1]
    for first in range(0, num_pages, PAGES_AT_ONCE):
        found, part = layer_parts(cache, layer, slice(first, first + PAGES_AT_ONCE))
        rows = torch.zeros(len(found), geometry.page_tokens, spec.kv_elements_per_token, device="cuda")
        number = torch.arange(len(found), device="cuda")
        group = (first + number) % value_dim
        if isinstance(spec, MLASpec):
            rows[number, :, group] = 1.0
        else:
            values = rows.view(len(found), geometry.page_tokens, 2, spec.num_kv_heads, spec.head_dim)
            values[number, :, 1, :, group] = 1.0
        frames[found, part] = rows.view(len(found), -1).bfloat16()
    pages = torch.arange(num_pages, device="cuda") % value_dim
    counts = torch.bincount(pages, minlength=value_dim).double()[None] * geometry.page_tokens
    counts[0, (num_pages - 1) % value_dim] -= 1  # the token's own slot, which the kernel writes
    query = attention.query(cache, layer).double()
    if isinstance(spec, MLASpec):
        counts = counts * (query[:, :value_dim] * spec.softmax_scale).exp()
    own_weight, own_value = _own_slot(attention, cache, layer, query)
    wanted = (counts + own_weight * own_value) / (counts.sum(1, keepdim=True) + own_weight)

    def error(found: PagedCache) -> float:
        return value_dim * float((attention.outputs(found, layer)[0].double() - wanted).abs().max())

    table = cache.frame_table.clone()
    table[0, 5] = table[0, 6]
    return error(cache), error(replace(cache, frame_table=table))


def _own_slot(
    attention: CacheAttention, cache: PagedCache, layer: int, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """e^score (heads, 1) and values (heads, value_dim) of the last slot, float64."""
    spec = attention.spec
    _, value_dim = key_value_dims(spec)
    found, part = layer_parts(cache, layer, slice(cache.frame_table.shape[1] - 1, None))
    row = cache.frames.view(torch.bfloat16)[found, part].view(-1, spec.kv_elements_per_token)[-1].double()
    if isinstance(spec, MLASpec):
        keys, values = row[None], row[None, :value_dim]
    else:
        pair = row.view(2, spec.num_kv_heads, spec.head_dim).repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
        keys, values = pair[0], pair[1]
    scores = (query * keys).sum(1, keepdim=True) * spec.softmax_scale
    return scores.exp(), values.expand(spec.num_heads, -1)
