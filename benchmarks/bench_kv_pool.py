"""What a page costs: handing it out and taking it back, granting it, and finding it mapped. No GPU, no model.

    python -m benchmarks.bench_kv_pool

The hot path is what a decode step does when a sequence crosses into a new page: the budget grants it and the pool hands
it out. `alloc_us_per_page` is the pool's part, the worst over the ways a page can come (off the model's own shelf, from
frames never used, from another model's shelf) and over pools of a thousand to a million pages; the page has the twelve
frames of Qwen3-30B-A3B at 256 tokens, but in the largest pools, where it has four. Limit: one page off a list.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

from benchmarks.report import Report
from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.kv_pool.pool import KVPool
from tests.support.fake_vmm import FakeVmmDriver

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BATCH = 1_000
"""Pages that are timed at a time: more pages are there, held by others."""

TARGET_US = 2.0


def width_of(num_pages: int) -> int:
    return 12 if num_pages <= 100_000 else 4


def best_us(prepare: Callable[[], Callable[[], None]], rounds: int, count: int = BATCH) -> float:
    """Least CPU time of one of `count` operations over the rounds: others have this machine too."""
    times = []
    for _ in range(rounds):
        work = prepare()
        gc.collect()
        gc.disable()
        started_s = time.thread_time()
        work()
        times.append(time.thread_time() - started_s)
        gc.enable()
    return 1e6 * min(times) / count


def full_pool(num_pages: int) -> KVPool:
    """A pool of two models, in which all pages but a batch are held."""
    width = width_of(num_pages)
    pool = KVPool(num_pages * width + 1)
    for model in ("a", "b"):
        pool.add_model(model, width)
    if num_pages > BATCH:
        pool.allocate("a", num_pages - BATCH)
    return pool


def one_by_one(pool: KVPool, model: str) -> Callable[[], None]:
    def work() -> None:
        for _ in range(BATCH):
            pool.allocate(model, 1)

    return work


def fresh(num_pages: int) -> Callable[[], None]:
    return one_by_one(full_pool(num_pages), "b")


def shelved(num_pages: int) -> Callable[[], None]:
    pool = full_pool(num_pages)
    pool.free("b", pool.allocate("b", BATCH) or ())
    return one_by_one(pool, "b")


def taken_over(num_pages: int) -> Callable[[], None]:
    pool = full_pool(num_pages)
    pool.free("b", pool.allocate("b", BATCH) or ())
    return one_by_one(pool, "a")


def freed(num_pages: int) -> Callable[[], None]:
    pool = full_pool(num_pages)
    pages = pool.allocate("b", BATCH) or ()

    def work() -> None:
        for page in pages:
            pool.free("b", (page,))

    return work


def granted(num_live: int) -> Callable[[], None]:
    """The budget's part of a page, beside that many live sequences that have everything set aside."""
    budget = PageBudget(num_live * 2_000)
    for sequence_id in range(num_live):
        budget.open(sequence_id, Claim(1, 2_000, 2_000, "a"))

    def work() -> None:
        for _ in range(100):
            budget.grow(0, 1, 2_000)

    return work


def list_floor() -> Callable[[], None]:
    pages = [tuple(range(12)) for _ in range(BATCH)]
    taken: list[tuple[int, ...]] = []

    def work() -> None:
        for _ in range(BATCH):
            taken.append(pages.pop())

    return work


def mapped_ahead() -> Callable[[], None]:
    """A step's new page that the mapper has mapped already: the lock, the look and the list of frames."""
    backing = VmmBacking(FakeVmmDriver(1), BATCH * 12 + 1, 1, has_thread=False)
    backing.add_model("a", 12)
    pages = [tuple(range(first, first + 12)) for first in range(1, BATCH * 12, 12)]
    backing.expect("a", pages)
    backing.drain()

    def work() -> None:
        for number, page in enumerate(pages):
            backing.spots("a", number, (page,), is_decode=True)
        assert backing.counts().decode_waits == 0

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    ways = {"fresh": fresh, "shelf": shelved, "taken_over": taken_over, "free": freed}
    found: dict[str, float] = {}
    for num_pages in SIZES:
        for name, prepare in ways.items():
            rounds = args.rounds if num_pages < SIZES[-1] else max(3, args.rounds // 2)
            found[f"{name}.{num_pages}"] = best_us(lambda: prepare(num_pages), rounds)  # noqa: B023 - called at once
            print(f"{name} of {num_pages} pages: {found[f'{name}.{num_pages}']:.2f} us", flush=True)
    allocations = {name: us for name, us in found.items() if not name.startswith("free")}
    worst = max(allocations.values())
    small, large = (max(us for name, us in allocations.items() if name.endswith(f".{n}")) for n in (SIZES[0], SIZES[2]))
    report = Report(
        "kv_pool",
        hardware="cpu",
        config={"rounds": args.rounds, "batch": BATCH, "frames_per_page": 12, "frames_per_page.1000000": 4},
        summary=(
            f"A page costs at most {worst:.2f} us, asked for: {TARGET_US:g}. CPU time of one thread, the least of the "
            "rounds. fresh: frames that were never used; shelf: a page that the same model gave back; taken_over: a "
            "page that another model gave back. grant: the budget's part of a page, under `reserve`."
        ),
    )
    floor_us = best_us(list_floor, args.rounds)
    report.metric("alloc_us_per_page", worst, limit=floor_us, note="one tuple off a list and onto another")
    report.metric("alloc_us_growth.1000_to_100000", large / small, limit=1.0, note="flat")
    for name, us in found.items():
        report.metric(f"{name.replace('.', '_us.')}", us)
    for num_live in (1, 32, 128):
        report.metric(f"grant_us.{num_live}_live", best_us(lambda n=num_live: granted(n), args.rounds, 100))  # type: ignore[misc]
    report.metric("mapped_ahead_us_per_page", best_us(mapped_ahead, args.rounds))
    print(report.as_markdown())
    if not args.no_write:
        for path in report.write():
            print(path.name)


if __name__ == "__main__":
    main()
