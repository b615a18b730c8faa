"""How fast do threads read files out of the page cache into pinned memory, by the size of their blocks?

    python -m benchmarks.bench_page_cache --directory /dev/shm [--gib 8] [--threads 1,8,12,16] [--mib 16,4,2,1]

Without and with copies to the GPU behind it: what the lock of one interpreter leaves of both. Each thread has two
blocks: one is read into while the other is copied from.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import RESULTS, Report
from crosspool.units import GiB, MiB

NUM_FILES = 8
BUFFERS = 2


def write_files(directory: Path, num_bytes: int) -> list[int]:
    """File descriptors of `NUM_FILES` files that hold `num_bytes` together."""
    block = np.random.default_rng(0).integers(0, 255, 64 * MiB, dtype=np.uint8).tobytes()
    fds = [os.open(directory / f"{number}.bin", os.O_RDWR | os.O_CREAT, 0o600) for number in range(NUM_FILES)]

    def fill(fd: int) -> None:
        for _ in range(max(1, num_bytes // NUM_FILES // len(block))):
            os.write(fd, block)

    writers = [threading.Thread(target=fill, args=(fd,)) for fd in fds]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    return fds


def read_gb_per_s(fds: Sequence[int], device: torch.device, num_threads: int, block_bytes: int, copies: bool) -> float:
    """All of the files once. copies: each block goes on to the device."""
    size = os.fstat(fds[0]).st_size
    places = [(fd, at) for at in range(0, size - block_bytes + 1, block_bytes) for fd in fds]
    todo, lock, start = iter(places), threading.Lock(), threading.Barrier(num_threads + 1)

    def take() -> tuple[int, int] | None:
        with lock:
            return next(todo, None)

    def serve() -> None:
        torch.cuda.set_device(device)
        stream: Any = torch.cuda.Stream(device)
        blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        there = torch.empty(block_bytes, dtype=torch.uint8, device=device)
        copied = [torch.cuda.Event() for _ in blocks]
        start.wait()
        with torch.cuda.stream(stream):
            for number, (fd, at) in enumerate(iter(take, None)):
                index = number % BUFFERS
                if copies and number >= BUFFERS:
                    copied[index].synchronize()
                os.preadv(fd, [memoryview(blocks[index].numpy())], at)
                if copies:
                    there.copy_(blocks[index], non_blocking=True)
                    copied[index].record(stream)
            stream.synchronize()

    threads = [threading.Thread(target=serve) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return len(places) * block_bytes / 1e9 / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="on a file system that the page cache holds")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--threads", default="1,8,12,16")
    parser.add_argument("--mib", default="16,4,2,1", help="of a block")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    report = Report("page_cache", hardware="h200", config={"gib": options.gib, "files": NUM_FILES}, seed=0)
    report.summary = "Files in the page cache read into pinned memory by several threads, GB/s."
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        fds = write_files(Path(name), int(options.gib * GiB))
        cases = itertools.product((False, True), map(int, options.threads.split(",")), map(int, options.mib.split(",")))
        for copies, num_threads, mib in cases:
            rate = read_gb_per_s(fds, device, num_threads, mib * MiB, copies)
            label = "to_gpu" if copies else "read"
            report.metric(f"page_cache_gb_per_s.{label}.{num_threads}_threads.{mib}_mib", rate)
            print(f"{label}, {num_threads} threads, blocks of {mib} MiB: {rate:.1f} GB/s", flush=True)
        for fd in fds:
            os.close(fd)
    report.write(options.out)


if __name__ == "__main__":
    main()
