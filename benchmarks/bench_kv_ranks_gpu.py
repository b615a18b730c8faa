"""One model over two KV ranks that share a GPU, and a KV worker on mapped frames: right, and how fast?

    python -m benchmarks.bench_kv_ranks_gpu [--out DIRECTORY] [--only split,mapped] [--layers N] [--gib N]

split: GLM-4.7-Flash at full size, random weights, seeded KV: one request takes every page of both ranks. Its steps are
compared with those of one rank that holds the same frames, so that only the split differs. Both ranks and the weights
rank share one GPU, so times show what the exchange costs, not what two GPUs bring. mapped: four layers of Qwen3-30B-A3B
on frames that are mapped for each model and have moved, against an arena, bit for bit.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.ranks.in_one_process import RanksInOneProcess
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames, DeviceFrames
from crosspool.backends.cuda.kv_frames.vmm import GRANULARITY, CudaVmmDriver
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.ahead import MappingHint
from crosspool.kv_pool.backing.mapped_frames import MappedFrames
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.kv_pool.pool import KVPool
from crosspool.kv_pool.split import spread_pages
from crosspool.units import GiB, MiB

MODEL = "glm-4.7-flash"
FRAME_BYTES = 2 * MiB
SEED = 11
CONTEXTS = (8192, 131072)
STEPS = 12
TURNS, ANSWER_TOKENS = 6, 24
"""Of the worker on mapped frames: requests, one after another, and tokens of each."""
TOLERANCE = 0.05
"""Of log-probabilities: parts of attention merged in another order round its bf16 the other way here and there."""


def split(report: Report, kernels: DeviceKernels, layers: int | None, gib: float) -> None:
    spec = replace(full_spec(MODEL, layers), max_position_embeddings=1 << 23)  # the context limit is lifted
    attention, ffn = (
        random_attention_weights(spec, SEED, kernels.device),
        random_ffn_weights(spec, SEED, kernels.device),
    )
    page_tokens = choose_page_tokens(spec, FRAME_BYTES)
    width = page_geometry(spec, page_tokens=page_tokens, frame_bytes=FRAME_BYTES).frames_per_page
    num_frames = int(gib * GiB) // FRAME_BYTES // 2
    arena = torch.empty(2 * num_frames, FRAME_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    arena.normal_(generator=torch.Generator(device="cuda").manual_seed(SEED))
    frames = arena.view(torch.uint8)
    pools = [KVPool(num_frames, idx * num_frames) for idx in range(2)]
    room = [pool.budget for pool in pools]
    owners = spread_pages(sum(each // width for each in room), width, room)
    assert owners is not None
    held = []
    for number, pool in enumerate(pools):
        pool.add_model(MODEL, width)
        held.append(list(pool.allocate(MODEL, owners.count(number)) or ()))
    pages = [held[owner].pop() for owner in owners]
    share = min(pool.used(MODEL) / pool.budget for pool in pools)
    longest = len(pages) * page_tokens
    one = RanksInOneProcess(kernels, spec, attention, ffn, [ArenaFrames(frames)], page_tokens)
    two = RanksInOneProcess(
        kernels, spec, attention, ffn, [ArenaFrames(part) for part in frames.split(num_frames)], page_tokens
    )
    name = MODEL if layers is None else f"{MODEL}-{layers}-layers"
    report.metric(f"one_request_tokens.{name}.2+1", longest, note="all three ranks on one GPU")
    report.metric(f"one_request_share.{name}.2+1", share, limit=1.0, note="of both KV ranks' budgets; asked for: 0.95")
    worst = 0.0
    for number, context in enumerate((*CONTEXTS, longest - STEPS)):
        if context + STEPS > longest:
            continue
        answers = []
        for ranks, label in ((one, "1+1"), (two, "2+1")):
            ranks.step(3 * number, [17], context, new_pages=pages, joining=_sampling(8))
            checked = [ranks.step(3 * number, [19 + idx], context + 1 + idx) for idx in range(3)]
            ranks.step(3 * number + 1, [17], context, new_pages=pages, joining=_sampling(None))
            times = []
            for idx in range(STEPS - 1):
                begin = time.perf_counter()
                ranks.step(3 * number + 1, [23 + idx], context + 1 + idx)
                times.append(1e3 * (time.perf_counter() - begin))
            report.samples(f"split_kv_decode_ms.{name}.{label}.{context // 1024}k", times, note="one GPU")
            answers.append(checked)
        worst = max(worst, _difference(*answers))
        same = [mine.token_id for mine in answers[0]] == [mine.token_id for mine in answers[1]]
        report.metric(f"split_kv_same_tokens.{name}.{context // 1024}k", int(same), limit=1)
        print(context, worst, same, flush=True)
    report.metric(f"split_kv_error.{name}", worst, limit=0.0, note="of the log-probabilities of the eight likeliest")
    print({key: round(value, 4) for key, value in report.metrics.items() if "p50" in key or "share" in key}, flush=True)
    assert worst < TOLERANCE, f"two KV ranks differ from one by {worst}"


def _sampling(num_logprobs: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=64, temperature=0.0, num_logprobs=num_logprobs)


def _difference(mine: list[SampledToken], theirs: list[SampledToken]) -> float:
    """Largest, over the likeliest tokens that both sides name; at least six of eight."""
    worst = 0.0
    for left, right in zip(mine, theirs, strict=True):
        found = {top.token_id: top.logprob for top in left.top_logprobs}
        shared = [(found[top.token_id], top.logprob) for top in right.top_logprobs if top.token_id in found]
        assert len(shared) >= 6, f"{len(shared)} of {len(found)} likeliest tokens are the same"
        worst = max(worst, *(abs(a - b) for a, b in shared))
    return worst


def mapped(report: Report, kernels: DeviceKernels) -> None:
    spec = full_spec("qwen3-30b-a3b", 4)
    attention, ffn = (
        random_attention_weights(spec, SEED, kernels.device),
        random_ffn_weights(spec, SEED, kernels.device),
    )
    page_tokens, num_frames = 16, 257
    shape = (num_frames, FRAME_BYTES)
    pool = KVPool(num_frames)
    pool.add_model("model", page_geometry(spec, page_tokens=page_tokens, frame_bytes=FRAME_BYTES).frames_per_page)
    backing = MappedFrames(CudaVmmDriver(0), *shape, GRANULARITY)
    moving = DeviceFrames(backing, FRAME_BYTES, kernels.device)
    still = ArenaFrames(torch.zeros(shape, dtype=torch.uint8, device="cuda"))
    sides = [RanksInOneProcess(kernels, spec, attention, ffn, [frames], page_tokens) for frames in (still, moving)]
    answers: list[list[list[SampledToken]]] = [[], []]
    for turn in range(TURNS):
        pages = pool.allocate("model", 40) or ()
        pages = pages if turn % 2 else tuple(reversed(pages))
        for side, found in zip(sides, answers, strict=True):
            tokens = [side.step(turn, range(5 + turn, 29 + turn), 0, new_pages=pages, joining=_sampling(8))]
            tokens += [side.step(turn, None, 24 + idx) for idx in range(ANSWER_TOKENS)]
            found.append(tokens)
            side.kv["kv0"].forget([turn])
        moving.hint([MappingHint(model="model", given_back=pages)])
        pool.free("model", pages)
        begin = time.monotonic()
        while moving.counts().mapped_frames and time.monotonic() < begin + 5:
            time.sleep(0.001)
    counts = moving.counts()
    same = answers[0] == answers[1]
    report.metric(
        "mapped_worker_same_tokens", int(same), limit=1, note="and log-probabilities, of requests one after another"
    )
    report.metric("mapped_worker_maps", counts.maps)
    report.metric("mapped_worker_unmaps", counts.unmaps)
    print(counts, same, flush=True)
    sides[1].kv["kv0"].remove_model("model")
    backing.close()
    assert same, "a worker on mapped frames differs from one on an arena"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="split,mapped")
    parser.add_argument("--layers", type=int, default=None, help="of the split model, its last ones")
    parser.add_argument("--gib", type=float, default=64.0, help="KV memory of both ranks together")
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda", 0))
    failures: dict[str, str] = {}
    config = {"layers": options.layers or "all", "kv_gib": options.gib, "dtype": "bf16"}
    report = Report("kv_ranks", hardware="h200", config=config, seed=SEED)
    report.summary = "Two KV ranks and a weights rank on one GPU against one KV rank; a KV worker on mapped frames."
    for name, work in (
        ("mapped", partial(mapped, report, kernels)),
        ("split", partial(split, report, kernels, options.layers, options.gib)),
    ):
        if name in options.only.split(","):
            guarded(name, work, failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
