"""How much faster the NumPy backend decodes than transformers' `generate` on the same CPU, in one run.

    python -m benchmarks.bench_numpy_decode                     # a tiny random Qwen3-MoE, written on the spot
    python -m benchmarks.bench_numpy_decode DIR [DIR ...]       # Hugging Face directories

Both sides run the same greedy requests of known length, turn by turn, and must give the same tokens. b1: one request
alone. c8: eight requests over the directories at once, against transformers running them one after another. The engine
has a decode lane for each model and hands out runs of up to DECODE_STEPS steps; all else is its default.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.judges.transformers_judge import TransformersModel
from benchmarks.ranks.engine_drive import Job, run_jobs, running_engine
from benchmarks.report import Report
from crosspool.config import SchedulingConfig
from crosspool.models.directory import read_model_dir
from crosspool.pools_config import HostLayout
from crosspool.server.garbage import settle_memory

SEED = 11
PROMPT_TOKENS = 16
DECODE_STEPS = 16
LAYOUTS: tuple[HostLayout, ...] = ("inprocess", "processes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each side, after one of warm-up")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; NumPy runs one a pool")
    parser.add_argument("--no-write", action="store_true", help="print, keep nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directories = args.directories or [_tiny_qwen3_moe(Path(scratch))]
        report = Report("numpy_decode", hardware="cpu", config=vars(args) | {"prompt_tokens": PROMPT_TOKENS}, seed=SEED)
        measure(report, directories, num_tokens=args.tokens, rounds=args.rounds, threads=args.threads)
    print(report.as_markdown())
    if not args.no_write:
        report.write()
    return 0


def measure(report: Report, directories: Sequence[Path], *, num_tokens: int, rounds: int, threads: int) -> None:
    """Add ratios and times of both layouts to `report`. Raises ValueError if the two sides' tokens differ."""
    jobs = _jobs(directories, num_tokens)
    judges = {path.name: TransformersModel(path, threads) for path in directories}
    times: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        asyncio.run(_compare(directories, layout, jobs, judges, rounds, times))
    per_token = 1e3 / num_tokens
    for name, limit in (("b1", 4.0), ("c8", 8.0)):
        theirs = np.array(times[f"transformers.{name}"])
        report.metric(f"transformers_ms_per_token.{name}.p50", float(np.median(theirs)) * per_token)
        for layout in LAYOUTS:
            ours = np.array(times[f"{layout}.{name}"])
            report.metric(f"crosspool_ms_per_token.{name}.{layout}.p50", float(np.median(ours)) * per_token)
            report.metric(f"crosspool_ms_per_token.{name}.{layout}.p99", float(np.percentile(ours, 99)) * per_token)
            ratio = float(np.median(theirs) / np.median(ours))
            report.metric(f"decode_ratio_vs_transformers.{name}.{layout}", ratio, note=f"asked: at least {limit:.0f}")


async def _compare(
    directories: Sequence[Path],
    layout: HostLayout,
    jobs: Sequence[Job],
    judges: dict[str, TransformersModel],
    rounds: int,
    times: dict[str, list[float]],
) -> None:
    scheduling = SchedulingConfig(num_decode_lanes=len(directories), decode_steps=DECODE_STEPS)
    async with running_engine(directories, layout, scheduling) as engine:
        settle_memory()
        for index in range(rounds + 1):  # the first is warm-up
            for name, batch in (("b1", jobs[:1]), ("c8", jobs)):
                ours, seconds = await run_jobs(engine, batch, f"{name}-{index}")
                judged = [judges[job.model].generate(list(job.prompt), job.num_tokens) for job in batch]
                _check([timed.token_ids for timed in judged], ours)
                if index:
                    times.setdefault(f"{layout}.{name}", []).append(seconds)
                    times.setdefault(f"transformers.{name}", []).append(sum(timed.seconds for timed in judged))


def _check(theirs: Sequence[list[int]], ours: Sequence[list[int]]) -> None:
    """A late difference may be a tie that rounding decides; an early one is a wrong answer."""
    for their, our in zip(theirs, ours, strict=True):
        same = next((idx for idx, (a, b) in enumerate(zip(their, our, strict=True)) if a != b), len(their))
        if same < 16:
            raise ValueError(f"the two sides differ at token {same}: {their[:20]} against {our[:20]}")


def _jobs(directories: Sequence[Path], num_tokens: int) -> list[Job]:
    rng = np.random.default_rng(SEED)
    vocab = {path.name: read_model_dir(path).spec.vocab_size for path in directories}
    names = [directories[idx % len(directories)].name for idx in range(8)]
    return [Job(name, tuple(rng.integers(0, vocab[name], PROMPT_TOKENS).tolist()), num_tokens) for name in names]


def _tiny_qwen3_moe(root: Path) -> Path:
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(root / "tiny-qwen3-moe", "qwen3_moe", seed=SEED, hidden=64, num_layers=4)


if __name__ == "__main__":
    sys.exit(main())
