"""How fast does a rank's share come from the page cache onto its GPU?

    python -m benchmarks.bench_reload [--models a,b] [--layers 24] [--directory DIR] [--readers 8,12,15] [--extents 4,8]

Writes checkpoints of the models' true shapes and names (bf16, shards of 4 GB), so that they lie in the page cache, then
streams their FFN shares again and again, in turn and at once, and compares tensors with the files. The limit is a copy
of 1 GiB from pinned memory, measured beside it. `--keep` leaves the files for `bench_recovery --parent`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from benchmarks.full_models import CONFIGS, write_model_dir
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.loading.streaming import stream_share
from crosspool.backends.cuda.loading.weights import random_std
from crosspool.models.directory import ModelDirectory, read_model_dir
from crosspool.models.families.registry import FAMILIES
from crosspool.models.tensors import model_tensors, weight_bytes
from crosspool.units import MiB
from crosspool.weights_pool.checkpoint import INDEX_NAME, Checkpoint
from crosspool.weights_pool.extents import Extent
from crosspool.weights_pool.loader import plan_load, reads
from crosspool.weights_pool.readers import BUFFERS_EACH, Readers

SHARD_BYTES = 4_000_000_000


def write_weights(path: Path, seed: int = 7) -> float:
    """Safetensors files of bf16 for the directory's config; gives GB/s.

    Norms are one, the rest random values, with the deviations that random weights on a device have.
    """
    spec = read_model_dir(path).spec
    family = FAMILIES[spec.family]
    stds = {
        source: None if "norm" in tensor.name else random_std(tensor, spec)
        for tensor in model_tensors(spec)
        for source in family.sources(tensor, ())
    }
    sources = sorted(stds, key=lambda each: each.name)
    std_of = {source.name: std for source, std in stds.items()}
    values = np.random.default_rng(seed).standard_normal(16 * 1024 * 1024, np.float32)
    noise = {
        std: memoryview((values * std).astype(ml_dtypes.bfloat16).tobytes()) for std in set(std_of.values()) if std
    }
    ones = memoryview(np.ones(1 << 20, ml_dtypes.bfloat16).tobytes())
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for source in sources:
        size += 2 * prod(source.shape)
        if size > SHARD_BYTES:
            shards.append([])
            size = 2 * prod(source.shape)
        shards[-1].append((source.name, source.shape))

    def write(number: int) -> None:
        header, begin = {}, 0
        for name, shape in shards[number]:
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, begin + 2 * prod(shape)]}
            begin += 2 * prod(shape)
        text = json.dumps(header).encode()
        with (path / shard_name(number, len(shards))).open("wb", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for place, (name, shape) in enumerate(shards[number]):
                std = std_of[name]
                left, block = 2 * prod(shape), noise[std] if std else ones
                first = 2 * 4099 * place % (len(block) // 2) if std else 0
                while left:
                    left -= file.write(block[first : first + min(left, len(block) - first)])

    begin = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(len(shards))))
    names = {name: shard_name(number, len(shards)) for number, shard in enumerate(shards) for name, _ in shard}
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    num_bytes = sum(2 * prod(shape) for shard in shards for _, shape in shard)
    return num_bytes / 1e9 / (time.perf_counter() - begin)


def shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def bus_gb_per_s(device: torch.device) -> float:
    """A copy from pinned memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    times = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return float(host.nbytes / 1e9 / min(times))


def read_gb_per_s(directory: ModelDirectory, count: int, extent_bytes: int) -> float:
    """The whole files by as many readers into the same buffers, with nobody who plans or copies."""
    sizes = {file: file.stat().st_size for file in sorted(directory.path.glob("*.safetensors"))}
    wanted = (
        Extent(file, start, min(start + extent_bytes, size), (), 0)
        for file, size in sizes.items()
        for start in range(0, size, extent_bytes)
    )
    with Readers(count, extent_bytes) as readers:
        readers.touch()
        free = deque(sorted(range(readers.num_buffers), key=lambda buffer: (buffer % BUFFERS_EACH, buffer)))
        num_reading = 0
        begin = time.perf_counter()
        for extent in wanted:
            while not free:
                ended = [buffer for buffer, _ in readers.ended(wait=True)]
                free.extend(ended)
                num_reading -= len(ended)
            readers.read(extent, free.popleft())
            num_reading += 1
        while num_reading:
            num_reading -= len(list(readers.ended(wait=True)))
        return sum(sizes.values()) / 1e9 / (time.perf_counter() - begin)


def num_different(directory: ModelDirectory, layers: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Of every 97th read, those that differ from the files."""
    different = 0
    with Checkpoint(directory.path) as checkpoint:
        for read in list(reads(checkpoint, plan_load(checkpoint, directory, "weights")))[::97]:
            assert read.tensor.layer is not None, read
            assert (read.region.pick, read.region.transpose) == ((), False), read
            found = layers[read.tensor.layer][read.tensor.name][read.region.index].float().cpu().numpy()
            stored = np.asarray(checkpoint.read(read.source, read.region.read), np.float32)
            different += not np.array_equal(found, stored.reshape(found.shape))
    return different


@dataclass
class Reload:
    """Layers of each model; seconds each took, and until its first extent was placed; of all; the threads' own time."""

    held: list[list[dict[str, torch.Tensor]]]
    seconds: list[float]
    first_s: list[float]
    whole_s: float
    own_s: float


def shares(
    directories: Sequence[ModelDirectory], device: torch.device, count: int, extent_bytes: int, *, at_once: bool
) -> Reload:
    """The FFN shares of all models, one after another, or at once as a restarted rank loads them."""
    torch.cuda.empty_cache()  # a rank that was restarted has no memory either

    def load(directory: ModelDirectory) -> tuple[list[dict[str, torch.Tensor]], float, float, float]:
        torch.cuda.set_device(device)
        begin, own = time.perf_counter(), time.thread_time()
        moments: list[float] = []

        def tell(loaded: int, total: int) -> None:
            if loaded:
                moments.append(time.perf_counter())

        _, layers = stream_share(
            directory,
            "weights",
            device,
            tell,
            num_readers=count,
            extent_bytes=extent_bytes,
        )
        torch.cuda.synchronize(device)
        return layers, time.perf_counter() - begin, moments[0] - begin, time.thread_time() - own

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(directories) if at_once else 1) as threads:
        held, seconds, first_s, own_s = zip(*threads.map(load, directories), strict=True)
    return Reload(list(held), list(seconds), list(first_s), time.perf_counter() - begin, sum(own_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="of every model; 0: all")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written; they may exist")
    parser.add_argument("--readers", default="12,15")
    parser.add_argument("--extents", default="4", help="MiB that are read at once")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only-write", action="store_true", help="checkpoints, and keep them")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.models.split(",")
    parent = options.directory or Path(tempfile.mkdtemp())
    for name in names if options.layers else ():
        CONFIGS[name]["num_hidden_layers"] = options.layers
    paths = [write_model_dir(parent, name) for name in names]
    report = Report("reload", hardware="h200", config={"models": names, "layers": options.layers}, seed=7)
    report.summary = "A weights rank's shares, one model after another, from files in the page cache to its GPU."
    try:
        for name, path in zip(names, paths, strict=True):
            if not (path / INDEX_NAME).exists():
                report.metric(f"write_gb_per_s.{name}", write_weights(path), note="the checkpoint, 8 threads")
        print(report.metrics, flush=True)
        if not options.only_write:
            measure(report, names, [read_model_dir(path) for path in paths], options)
    finally:
        if not (options.keep or options.only_write):
            shutil.rmtree(parent)
    if not options.only_write:
        report.write(options.out)


def measure(
    report: Report, names: Sequence[str], directories: Sequence[ModelDirectory], options: argparse.Namespace
) -> None:
    """Every number of readers with every size of extents."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    bus = bus_gb_per_s(device)
    report.metric("bus_gb_per_s", bus, note="1 GiB from pinned memory")
    gigabytes = [weight_bytes(directory.spec, "weights") / 1e9 for directory in directories]
    report.metric("share_gb", sum(gigabytes), note="of all models")
    turns = (False, True) if len(directories) > 1 else (False,)
    cases = itertools.product(turns, map(int, options.readers.split(",")), map(int, options.extents.split(",")))
    for index, (at_once, count, mib) in enumerate(cases):
        found = []
        for repeat in range(options.repeats):
            one = shares(directories, device, count, mib * MiB, at_once=at_once)
            if index == 0 and repeat == 0:
                pairs = zip(directories, one.held, strict=True)
                different = sum(num_different(directory, layers) for directory, layers in pairs)
                report.metric("reads_that_differ", different, limit=0, note="of every 97th, compared with the files")
                report.metric("reload_gb_per_s.first", sum(gigabytes) / one.whole_s, limit=bus, note="the first of all")
            one.held.clear()
            found.append(one)
        best = min(found, key=lambda each: each.whole_s)
        label = f"{'at_once' if at_once else 'in_turn'}.{count}_readers.{mib}_mib"
        whole = sum(gigabytes) / best.whole_s
        report.metric(f"reload_gb_per_s.{label}", whole, limit=bus, note="all models; the bus; target 40")
        report.metric(f"reload_own_s.{label}", best.own_s, limit=best.whole_s, note="of the planning thread's CPU time")
        if not at_once:
            alone = max(read_gb_per_s(directories[0], count, mib * MiB) for _ in range(2))
            report.metric(f"read_gb_per_s.{count}_readers.{mib}_mib", alone, note="the same reads, nobody copies them")
            print(f"{count} readers of {mib} MiB alone: {alone:.1f} GB/s", flush=True)
        for name, size, seconds, first_s in zip(names, gigabytes, best.seconds, best.first_s, strict=True):
            if not at_once:
                report.metric(f"reload_gb_per_s.{label}.{name}", size / seconds, limit=bus)
            report.metric(f"reload_first_s.{label}.{name}", first_s, note="until the first extent is placed")
        rates = [round(sum(gigabytes) / each.whole_s, 1) for each in found]
        times = [[round(each, 3) for each in some] for some in (best.seconds, best.first_s)]
        print(
            f"{label}: {rates} GB/s of {sum(gigabytes):.1f} GB; models, first {times}, own {best.own_s:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
