"""What does one request cost, and how far does it reach, over two KV ranks in processes and on GPUs of their own?

    python -m benchmarks.bench_split_kv_gpu [--out DIRECTORY] [--gib N] [--weights-ranks 2]

GLM-4.7-Flash at full size, random weights, split by tokens: `kv0` has GPU 0, `kv1` shares GPU 1 with the weights rank.
With two weights ranks each GPU has one of them beside its KV rank, in one process. One request takes every page of both
KV ranks. Its steps are compared with those of one KV rank that holds the same frames on GPU 0, at the same contexts; as
a control, with that rank's where the second half of the pages repeats the first. Both deployments are loaded at once,
which bounds the pools.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.kv_pool.filled_arenas import BLOCK_FRAMES, FilledArenas
from benchmarks.ranks.stepped_cluster import SteppedCluster
from benchmarks.report import RESULTS, Report
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.config import ClusterConfig
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.kv_pool.pool import KVPool, Page
from crosspool.kv_pool.split import exchange_width, spread_pages
from crosspool.models.spec import ModelSpec
from crosspool.units import GiB, MiB

MODEL = "glm-4.7-flash"
FRAME_BYTES = 2 * MiB
SEED, KV_STD = 11, 4.5
"""Of cached latents: few of a million slots then share a head's attention, and what they hold counts."""

CONTEXTS = (8192, 131072)
CHECKED, TIMED = 3, 11
TOLERANCE = 0.1
"""Of log-probabilities: partial attention merged in another order rounds its bf16 the other way here and there, which
scores of this width raise, and now and then an expert near a tie."""


class Split:
    """The request over both KV ranks, and the same over one.

    label: of the split deployment in names of metrics; one that needs more ranks than GPUs says so.
    """

    def __init__(self, report: Report, gib: float, directory: Path, num_weights: int) -> None:
        self.report, self.directory, self.num_weights = report, directory, num_weights
        self.label = "2+1" if num_weights == 1 else "2+2-on-2-gpus"
        self.spec: ModelSpec = replace(full_spec(MODEL), max_position_embeddings=1 << 23)
        self.page_tokens = choose_page_tokens(self.spec, FRAME_BYTES)
        self.num_frames = int(gib * GiB) // FRAME_BYTES // 2 // BLOCK_FRAMES * BLOCK_FRAMES
        self.pages, share = self._take_all()
        self.longest = len(self.pages) * self.page_tokens
        weights = (
            "kv0 on GPU 0, kv1 and w0 on GPU 1" if num_weights == 1 else "kv0 and w0 on GPU 0, kv1 and w1 on GPU 1"
        )
        note = f"{weights}; KV ranks in processes of their own"
        report.metric(f"one_request_tokens.{MODEL}.{self.label}", self.longest, note=note)
        report.metric(
            f"one_request_share.{MODEL}.{self.label}", share, limit=1.0, note="of both budgets; asked for: 0.95"
        )

    def run(self) -> None:
        begin_s = time.perf_counter()
        both = FilledArenas((0, 1), self.num_frames, FRAME_BYTES, SEED, KV_STD)
        whole = FilledArenas((0,), 2 * self.num_frames, FRAME_BYTES, SEED, KV_STD)
        print(f"drawn after {time.perf_counter() - begin_s:.1f} s", flush=True)
        two = SteppedCluster(self._config(both, self.num_frames, 2), self._placement(2))
        one = SteppedCluster(self._config(whole, 2 * self.num_frames, 1), self._placement(1))
        try:
            for cluster in (two, one):
                cluster.load()
            two.wait()
            print(f"{self.label} is ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
            split = self._answers(two, self.label)
            one.wait()
            print(f"1+1 is ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
            single = self._answers(one, "1+1")
            half = self.pages[: len(self.pages) // 2]
            repeated = tuple(page for page in half for _ in range(2))
            control = self._checked(one, 900, self.longest - TIMED - 1, repeated)
        finally:
            two.close()
            one.close()
        self._compare(split, single, control)

    def _answers(self, cluster: SteppedCluster, label: str) -> dict[int, list[SampledToken]]:
        """Tokens checked at every context; times beside them."""
        found = {}
        for number, context in enumerate((*CONTEXTS, self.longest - TIMED - 1)):
            found[context] = self._checked(cluster, 2 * number + 1, context, self.pages)
            cluster.step(2 * number + 2, [17], context, new_pages=self.pages, joining=_sampling(None))
            times = []
            for idx in range(TIMED):
                begin_s = time.perf_counter()
                cluster.step(2 * number + 2, [23 + idx], context + 1 + idx)
                times.append(1e3 * (time.perf_counter() - begin_s))
            name = f"split_kv_decode_ms.{MODEL}.{label}.{context // 1024}k"
            self.report.samples(name, times, note="from hand-out to token")
            print(f"{name}: {sorted(times)[TIMED // 2]:.3f}", flush=True)
        return found

    def _checked(
        self, cluster: SteppedCluster, sequence_id: int, context: int, pages: tuple[Page, ...]
    ) -> list[SampledToken]:
        found = [cluster.step(sequence_id, [17], context, new_pages=pages, joining=_sampling(8))]
        return found + [cluster.step(sequence_id, [19 + idx], context + 1 + idx) for idx in range(CHECKED)]

    def _compare(
        self, split: dict[int, list[SampledToken]], single: dict[int, list[SampledToken]], control: list[SampledToken]
    ) -> None:
        worst = 0.0
        for context, tokens in split.items():
            pairs = list(zip(tokens, single[context], strict=True))
            worst = max(worst, *(_difference(mine, theirs) for mine, theirs in pairs))
            same = sum(mine.token_id == theirs.token_id for mine, theirs in pairs)
            name = f"split_kv_same_tokens.{MODEL}.{context // 1024}k"
            self.report.metric(name, same, limit=1 + CHECKED, note="as on one KV rank")
            print(f"{name}: {same} of {len(pairs)}, {worst:.4f}", flush=True)
        last = list(split.values())[-1]
        other = min(_difference(mine, theirs) for mine, theirs in zip(last, control, strict=True))
        self.report.metric(f"split_kv_error.{MODEL}", worst, limit=0.0, note="of log-probabilities of the likeliest")
        self.report.metric(f"split_kv_control.{MODEL}", other, note="the same at least, half of the pages left out")
        print(f"error {worst:.4f}, control {other:.4f}", flush=True)
        assert worst < min(TOLERANCE, other / 3), f"two KV ranks differ from one by {worst}, half the pages by {other}"

    def _take_all(self) -> tuple[tuple[Page, ...], float]:
        """Every page of both ranks' idle pools as a split sequence gets them, and the smaller share of a budget."""
        width = page_geometry(self.spec, page_tokens=self.page_tokens, frame_bytes=FRAME_BYTES).frames_per_page
        pools = [KVPool(self.num_frames, idx * self.num_frames) for idx in range(2)]
        room = [pool.budget for pool in pools]
        owners = spread_pages(sum(each // width for each in room), width, room)
        assert owners is not None
        held: list[list[Page]] = []
        for number, pool in enumerate(pools):
            pool.add_model(MODEL, width)
            held.append(list(pool.allocate(MODEL, owners.count(number)) or ()))
        return tuple(held[owner].pop() for owner in owners), min(pool.used(MODEL) / pool.budget for pool in pools)

    def _config(self, arenas: FilledArenas, num_frames: int, num_kv: int) -> ClusterConfig:
        return ClusterConfig(
            backend="cuda",
            kv_ranks=tuple(f"kv{idx}" for idx in range(num_kv)),
            weights_ranks=self._weights_ranks(num_kv),
            hosts=_hosts(num_kv, self.num_weights),
            devices=tuple((rank, gpu) for gpu, ranks in enumerate(_gpus(num_kv, self.num_weights)) for rank in ranks),
            arenas=arenas.arenas,
            token=arenas.token,
            num_frames=num_frames,
            frame_bytes=FRAME_BYTES,
            max_tokens_per_step=64,
            num_lanes=1,
            spin_us=200_000,
        )

    def _weights_ranks(self, num_kv: int) -> tuple[str, ...]:
        return tuple(f"w{idx}" for idx in range(self.num_weights if num_kv == 2 else 1))

    def _placement(self, num_kv: int) -> ModelPlacement:
        is_split = num_kv == 2
        return ModelPlacement(
            name=MODEL,
            directory=self.directory,
            hidden_size=self.spec.hidden_size,
            kv_rank="kv0",
            kv_peers=("kv1",) if is_split else (),
            kv_split="tokens" if is_split else "one",
            exchange_width=exchange_width(self.spec, "tokens" if is_split else "one"),
            weights_ranks=self._weights_ranks(num_kv),
            page_tokens=self.page_tokens,
            frame_bytes=FRAME_BYTES,
            kv_dtype="bfloat16",
            has_random_weights=True,
        )


def _gpus(num_kv: int, num_weights: int) -> tuple[tuple[str, ...], ...]:
    """The ranks of each GPU. One KV rank has a GPU of its own."""
    if num_kv == 1:
        return ("kv0",), ("w0",)
    return (("kv0",), ("kv1", "w0")) if num_weights == 1 else (("kv0", "w0"), ("kv1", "w1"))


def _hosts(num_kv: int, num_weights: int) -> tuple[tuple[str, ...], ...]:
    """Ranks that share a GPU share a process."""
    return tuple(ranks for ranks in _gpus(num_kv, num_weights) if len(ranks) > 1)


def _sampling(num_logprobs: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=64, temperature=0.0, num_logprobs=num_logprobs)


def _difference(mine: SampledToken, theirs: SampledToken) -> float:
    """Largest, over the likeliest tokens that both sides name; infinite where those are less than half."""
    found = {top.token_id: top.logprob for top in mine.top_logprobs}
    shared = [abs(found[top.token_id] - top.logprob) for top in theirs.top_logprobs if top.token_id in found]
    return max(shared) if 2 * len(shared) >= len(found) else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--weights-ranks", type=int, default=1, choices=(1, 2), help="of the split deployment")
    parser.add_argument("--gib", type=float, default=48.0, help="KV memory of both ranks together")
    options = parser.parse_args()
    torch.cuda.init()
    config = {"kv_gib": options.gib, "dtype": "bf16"}
    what = "split_kv" if options.weights_ranks == 1 else "split_kv_two_weights_ranks"
    report = Report(what, hardware="h200-x2", config=config, seed=SEED)
    report.summary = "GLM-4.7-Flash over two KV ranks in processes on two GPUs against one KV rank."
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        config_json = CONFIGS[MODEL] | {"max_position_embeddings": 1 << 23}  # the context limit is lifted
        (Path(directory) / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
        guarded("split", partial(_run, report, options.gib, Path(directory), options.weights_ranks), failures)
    report.write(options.out)
    write_failures(failures, options.out)


def _run(report: Report, gib: float, directory: Path, num_weights: int) -> None:
    Split(report, gib, directory, num_weights).run()


if __name__ == "__main__":
    main()
