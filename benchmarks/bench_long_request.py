"""Does a whole model decode rightly against one request that fills a KV GPU, its weights on another GPU?

    python -m benchmarks.bench_long_request [--out DIRECTORY] [--gib N] [--layers N]

Qwen3-30B-A3B at full size, random weights: attention and KV on GPU 0, every FFN on GPU 1, real workers and crossings.
The request takes every page of the pool. Its KV is drawn from a seed, keys wide enough that attention is decided by
some tens of slots anywhere among them, values wide enough that the next token depends on it. Every token decoded is
judged by `float32_model.py`, over all slots and, as a control, over every second page.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.judges.float32_model import token_logits
from benchmarks.ranks.in_one_process import RanksInOneProcess
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights, random_attention_weights, random_ffn_weights
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.kv_pool.pool import KVPool, Page
from crosspool.models.spec import GQASpec, ModelSpec
from crosspool.units import GiB, MiB

MODEL = "qwen3-30b-a3b"
FRAME_BYTES = 2 * MiB
SEED = 11
KEY_WIDTH, VALUE_WIDTH = 3.25, 8.0
"""Standard deviations of cached keys and values; of N tokens some N exp(-KEY_WIDTH^2) then share a head's attention."""

JUDGED, TIMED = 4, 12
"""Tokens decoded and judged; steps timed."""

LEFT_FREE_BYTES = 8 * GiB
"""Of the KV GPU, for kernels, buffers and the judge."""

TOLERANCE = 0.1
"""Of log-probabilities. Expert choices near a tie go the other way now and then where rows are rounded to bf16."""


def long_request(
    report: Report,
    kernels: tuple[DeviceKernels, DeviceKernels],
    spec: ModelSpec,
    attention: AttentionWeights,
    ffn: tuple[FFNLayerWeights, ...],
    arena: torch.Tensor,
) -> None:
    """arena: (frames, frame_bytes) uint8, drawn by `fill`, on the first kernels' device; ffn: on the second's."""
    page_tokens = choose_page_tokens(spec, arena.shape[1])
    geometry = page_geometry(spec, page_tokens=page_tokens, frame_bytes=arena.shape[1])
    pages, share = _all_pages(len(arena), geometry.frames_per_page)
    tokens = len(pages) * page_tokens
    context = tokens - max(JUDGED, TIMED) - 1
    name = f"{MODEL}.1+1"
    report.metric(f"one_request_tokens.{name}", tokens, note="whole model, KV and weights on a GPU each")
    report.metric(f"one_request_share.{name}", share, limit=1.0, note="of the pool's budget; asked for: 0.95")
    ranks = RanksInOneProcess(kernels[0], spec, attention, ffn, [ArenaFrames(arena)], page_tokens, kernels[1])
    given, found = [17], list[SampledToken]()
    for idx in range(JUDGED):
        joining = dict(new_pages=pages, joining=_sampling(8)) if idx == 0 else {}
        found.append(ranks.step(1, [given[-1]], context + idx, **joining))  # type: ignore[arg-type]
        given.append(found[-1].token_id)
    print(f"{tokens} tokens, {share:.4f} of the budget; decoded {given[1:]}", flush=True)
    table = torch.from_numpy(np.array([pages], dtype=np.int32)).to(arena.device)
    cache = PagedCache(frames=arena, frame_table=table, geometry=geometry)
    half = replace(cache, frame_table=table[:, ::2].contiguous())
    same, worst = 0, 0.0
    for idx, token in enumerate(found):
        begin_s = time.perf_counter()
        wanted = token_logits(spec, attention, ffn, cache, given[idx], context + idx).log_softmax(0).cpu()
        judged_s = time.perf_counter() - begin_s
        same += int(wanted.argmax()) == token.token_id
        worst = max(worst, _difference(token, wanted))
        print(f"  {token.token_id} {int(wanted.argmax())}: {worst:.4f}, {judged_s:.1f} s", flush=True)
    other = token_logits(spec, attention, ffn, half, given[0], context, context // 2).log_softmax(0).cpu()
    control = _difference(found[0], other)
    print(f"  over half of the pages {int(other.argmax())}: {control:.3f}", flush=True)
    report.metric(f"one_request_same_tokens.{name}", same, limit=JUDGED, note="the next token, of a float32 model")
    report.metric(f"one_request_logprob_error.{name}", worst, limit=0.0, note="of the eight likeliest tokens")
    report.metric(f"one_request_logprob_control.{name}", control, note="of the first token, over every second page")
    _time(report, ranks, pages, context, name)
    assert same == JUDGED, f"{JUDGED - same} of {JUDGED} tokens are not those of the float32 model"
    assert worst < min(TOLERANCE, control / 3), f"log-probabilities differ by {worst}, over half the pages by {control}"


def _time(report: Report, ranks: RanksInOneProcess, pages: tuple[Page, ...], context: int, name: str) -> None:
    ranks.step(2, [17], context, new_pages=pages, joining=_sampling(None))
    times = []
    for idx in range(TIMED):
        begin_s = time.perf_counter()
        ranks.step(2, [23 + idx], context + 1 + idx)
        times.append(1e3 * (time.perf_counter() - begin_s))
    report.samples(f"one_request_decode_ms.{name}.{context // 1024}k", times, note="a step, its host's part included")
    print(f"  {sorted(times)[TIMED // 2]:.2f} ms a step", flush=True)


def _all_pages(num_frames: int, width: int) -> tuple[tuple[Page, ...], float]:
    """Every page of an otherwise idle pool, in any order, and the share of its budget."""
    pool = KVPool(num_frames)
    pool.add_model(MODEL, width)
    pages = list(pool.allocate(MODEL, pool.budget // width) or ())
    random.Random(SEED).shuffle(pages)
    return tuple(pages), pool.used(MODEL) / pool.budget


def _sampling(num_logprobs: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=64, temperature=0.0, num_logprobs=num_logprobs)


def _difference(token: SampledToken, wanted: torch.Tensor) -> float:
    """Largest, of the log-probabilities of the tokens that the worker found likeliest."""
    return max(abs(top.logprob - float(wanted[top.token_id])) for top in token.top_logprobs)


def fill(arena: torch.Tensor, spec: ModelSpec, seed: int) -> None:
    """Draw keys and values into every frame; a slot is keys of all heads, then values."""
    attention = spec.layers[0].attention
    assert isinstance(attention, GQASpec)
    values = arena.view(torch.bfloat16)
    values.normal_(generator=torch.Generator(device=arena.device).manual_seed(seed))
    slots = values[:, : values.shape[1] // attention.kv_elements_per_token * attention.kv_elements_per_token]
    parts = slots.view(len(arena), -1, 2, attention.kv_elements_per_token // 2)
    parts[:, :, 0].mul_(KEY_WIDTH)
    parts[:, :, 1].mul_(VALUE_WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--layers", type=int, default=None, help="only the last so many")
    parser.add_argument("--gib", type=float, default=None, help="of KV; all that is free but some if not given")
    options = parser.parse_args()
    begin_s = time.perf_counter()
    kernels = (DeviceKernels(torch.device("cuda", 0)), DeviceKernels(torch.device("cuda", 1)))
    spec = replace(full_spec(MODEL, options.layers), max_position_embeddings=1 << 23)  # the context limit is lifted
    ffn = random_ffn_weights(spec, SEED, kernels[1].device)
    attention = random_attention_weights(spec, SEED, kernels[0].device)
    torch.cuda.synchronize(0)
    num_bytes = int(options.gib * GiB) if options.gib else torch.cuda.mem_get_info(0)[0] - LEFT_FREE_BYTES
    arena = torch.empty(num_bytes // FRAME_BYTES, FRAME_BYTES, dtype=torch.uint8, device=kernels[0].device)
    fill(arena, spec, SEED)
    for device in range(2):
        torch.cuda.synchronize(device)
    print(f"{num_bytes / GiB:.1f} GiB of KV, drawn after {time.perf_counter() - begin_s:.1f} s", flush=True)
    config = {"layers": options.layers or "all", "kv_gib": num_bytes / GiB, "dtype": "bf16"}
    report = Report("long_request", hardware="h200-x2", config=config, seed=SEED)
    report.summary = "Qwen3-30B-A3B whole, one request that takes every page of a KV GPU, weights on another GPU."
    failures: dict[str, str] = {}
    guarded("long request", partial(long_request, report, kernels, spec, attention, ffn, arena), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
