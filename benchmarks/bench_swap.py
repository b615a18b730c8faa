"""How fast does a whole model come from pinned host memory to a prefill rank's GPU?

    python -m benchmarks.bench_swap [--model qwen3-30b-a3b] [--layers 16] [--repeats 5]

A cut of a full-size model with random weights, a layer a copy, as a prefill rank brings it in. The limit is one copy of
1 GiB between the same two memories.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import mkdtemp

import torch

from benchmarks.full_models import write_model_dir
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.prefill_rank.host_blob import HostBlob
from crosspool.backends.cuda.prefill_rank.host_model import load_whole
from crosspool.backends.cuda.prefill_rank.places import Place
from crosspool.backends.cuda.prefill_rank.swap import Swapper, copy_in
from crosspool.cluster.base import ModelPlacement
from crosspool.models.directory import read_model_dir
from crosspool.units import GiB


def one_copy_gb_per_s(site: Site) -> float:
    """The bus: the best of five copies of 1 GiB of pinned memory."""
    blob = HostBlob(site, {0: GiB})
    to, stream = torch.empty(GiB, dtype=torch.uint8, device=site.device), torch.cuda.Stream(site.device)
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        copy_in(to, blob.memory, 0, GiB, stream)
        end.record(stream)
        stream.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    blob.close()
    return GiB / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    site = Site("p0", device, Driver("p0"), {"p0": 0}, None)
    report = Report("swap", hardware="h200")
    bus = one_copy_gb_per_s(site)
    directory = read_model_dir(write_model_dir(Path(mkdtemp()), options.model, options.layers))
    placement = ModelPlacement(
        name=options.model,
        directory=directory.path,
        hidden_size=directory.spec.hidden_size,
        kv_rank="kv0",
        weights_ranks=("w0",),
        prefill_ranks=("p0",),
        page_tokens=16,
        frame_bytes=2**21,
        kv_dtype="bfloat16",
        has_random_weights=True,
    )
    began = time.perf_counter()
    host = load_whole(directory, placement, site, lambda loaded, total: None)
    seconds = time.perf_counter() - began
    place, swapper = Place(torch.empty(host.num_bytes, dtype=torch.uint8, device=device)), Swapper(device)
    rates = []
    for _ in range(options.repeats):
        in_place = swapper.bring(host, place)
        swapper.settle()
        taken = in_place.seconds()
        assert taken
        rates.append(host.num_bytes / taken / 1e9)
    for group in host.blob.groups.values():
        assert torch.equal(place.memory[group.start : group.stop].cpu(), host.blob.memory[group.start : group.stop])
    label = f"{options.model}.{options.layers}-layers"
    report.metric(f"swap_gb_per_s.{label}", sorted(rates)[len(rates) // 2], limit=bus, note="one copy of 1 GiB")
    report.metric(f"swap_gb_per_s_worst.{label}", min(rates), limit=bus)
    report.metric(f"host_load_s.{label}", seconds, note=f"{host.num_bytes / 1e9:.1f} GB drawn, copied and pinned")
    found = [round(rate, 1) for rate in rates]
    print(f"{label}: {host.num_bytes / 1e9:.1f} GB, GB/s {found}, bus {bus:.1f}; loaded in {seconds:.1f} s", flush=True)
    report.write(Path(options.out))


if __name__ == "__main__":
    main()
