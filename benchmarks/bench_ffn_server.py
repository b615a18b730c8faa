"""How fast does the resident FFN server answer?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_ffn_server [--out DIRECTORY]

Round trip: a kernel on one GPU stands where attention would be; it puts rows into the weights GPU's memory, waits for
the sums in its own, and goes on with the next layer. Layers rotate, so weights come from device memory. Decode steps
with the server are among those of `bench_decode_step`, rounds after random pauses those of `bench_ffn_stress`.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bench_moe_layer import choose_distinct, layer_bytes
from benchmarks.crossings.ffn_client import FFNClient
from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.crossings.one_gpu import OneGpu
from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.model import Gpus
from benchmarks.split_model.parts import COPY_TB_PER_S
from crosspool.backends.cuda.kernels.moe import ffn
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.random_slices import random_ffn_slices
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.models.spec import MoEFFNSpec

NUM_LAYERS = 12
SEED = 7
TARGETS = {
    ("ffn", 1): {1: 31.0},
    ("kv", 1): {1: 27.0, 2: 45.0, 4: 82.0, 8: 158.0},
    ("kv", 2): {1: 19.0},
    ("ffn", 2): {1: 19.0},
}
"""Asked of Qwen3-30B-A3B, all experts distinct, by route and number of servers."""
HOPS_US = 5.5
WARM_UP_S = 0.4


def round_trips(
    gpus: Gpus, report: Report, name: str, batches: list[int], routings: list[str], passes: int, route: str
) -> None:
    """Medians over passes of the mean round trip of their layers, and the sums' error; a server for each GPU but the
    client's."""
    spec, num_servers = full_spec(name, NUM_LAYERS), len(gpus.devices) - 1
    slices = random_ffn_slices(spec, SEED, gpus.devices[1:])
    moe = slices[0][0].spec
    assert isinstance(moe, MoEFFNSpec)
    for routing in routings:
        for batch in batches:
            if routing == "distinct" and batch * moe.top_k > moe.num_experts:
                continue
            client = FFNClient(gpus, slices, batch, seed=SEED + batch, takes_choices=route == "kv")
            unique = prepare_routing(gpus, slices, client, routing, route)
            begin = time.perf_counter()
            while time.perf_counter() - begin < WARM_UP_S:  # not by matrix products: clocks are lower behind them
                client.run(passes)
            times = client.run(passes)
            error = client.error()
            floor = layer_bytes(slices[0][0], unique) / COPY_TB_PER_S / 1e6 + HOPS_US
            suffix = f"{route}{'' if routing == 'distinct' else '.uniform'}"
            report.samples(
                f"ffn_roundtrip_us.{name}.tp{num_servers}.b{batch}.{suffix}",
                times,
                limit=floor,
                note=f"bytes at {COPY_TB_PER_S} TB/s and two bare hops; {unique:.1f} experts a layer",
            )
            report.metric(f"ffn_roundtrip_error.{name}.tp{num_servers}.b{batch}.{suffix}", error, limit=2e-3)
            median = sorted(times)[len(times) // 2]
            is_named = name.startswith("qwen3") and routing == "distinct"
            goal = TARGETS.get((route, num_servers), {}).get(batch) if is_named else None
            print(
                f"{name} tp{num_servers} b{batch} {suffix}: {median:.2f} us, floor {floor:.1f}, target {goal}, "
                f"error {error:.1e}",
                flush=True,
            )
            client.close()


def prepare_routing(
    gpus: Gpus,
    slices: Sequence[Sequence[FFNLayerWeights]],
    client: FFNClient,
    routing: str,
    route: str = "ffn",
) -> float:
    """Mean number of experts that a layer reads for the client's rows."""
    unique = []
    for gpu, layers in enumerate(slices, 1):
        with torch.cuda.device(gpus.devices[gpu]):
            half = FFNHalf(gpus.kernels[gpu], layers, client.batch)
            out = torch.empty(client.batch, layers[0].hidden, dtype=torch.float32, device=gpus.devices[gpu])
            for idx, layer in enumerate(layers):
                x = client.rows[idx].to(gpus.devices[gpu])
                if routing == "distinct":
                    torch.manual_seed(SEED + idx)  # the same experts on every GPU
                    choose_distinct(layer, x)
                ffn(gpus.kernels[gpu], layer, x, out, half.scratch)
                assert isinstance(layer.spec, MoEFFNSpec)
                chosen, shape = half.scratch.routing, (client.batch, layer.spec.top_k)
                unique.append(int(chosen.num_unique.item()))
                if route == "kv" and gpu == 1:
                    client.choose(chosen.topk_ids.clone().view(shape), chosen.topk_weights.clone().view(shape))
    return sum(unique) / len(unique)


def idle_power(gpus: Gpus, report: Report, before: float) -> None:
    spec = full_spec("deepseek-v2-lite", 2)
    with torch.cuda.device(gpus.devices[1]):
        layers = random_ffn_weights(spec, SEED, gpus.devices[1])
    client = FFNClient(gpus, [layers], 1, seed=3, idle_s=4.0)
    client.run(1)
    time.sleep(2.0)
    resident = power_watts(1)
    client.close()
    report.metric("idle_watts.resident", resident, note="the server waits for rows")
    report.metric("idle_watts.without", before)
    print(f"idle power: {before} W without, {resident} W with the server waiting", flush=True)


class BothGpus(Gpus):
    """The client's GPU, another one, and the first once more but for one multiprocessor: two servers."""

    def __init__(self) -> None:
        super().__init__(2)
        first = self.kernels[0]
        self.devices.append(self.devices[0])
        self.kernels.append(MostOfAGpu(first, first.num_sms - 1))  # type: ignore[arg-type]


def power_watts(gpu: int) -> float:
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--skip", default="", help="parts to leave out: roundtrip,power")
    parser.add_argument("--routes", default="ffn,kv")
    parser.add_argument("--routings", default="uniform,distinct")
    parser.add_argument("--gpus", type=int, default=2, help="the client's, and one for each server")
    parser.add_argument("--one-gpu", action="store_true", help="both sides on one GPU")
    parser.add_argument("--both", action="store_true", help="a server on either GPU, one of them beside the client")
    parser.add_argument("--hang-seconds", type=float, default=240.0, help="give up where nothing ends")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    gpus: Gpus = OneGpu() if options.one_gpu else BothGpus() if options.both else Gpus(options.gpus)
    failures, skipped = dict[str, str](), options.skip.split(",") + (["power"] if options.one_gpu else [])
    idle_watts = 0.0 if options.one_gpu else power_watts(1)
    hardware = "h200" if options.one_gpu else f"h200-x{options.gpus}"
    report = Report(
        "ffn_server", hardware=hardware, config={"num_layers": NUM_LAYERS, "passes": options.passes}, seed=SEED
    )
    report.summary = "The resident FFN server: round trips from another GPU, crossings included."
    names = options.models.split(",")
    if "roundtrip" not in skipped:
        for name in names:
            batches = [1, 2, 4, 8] if name.startswith("qwen3") else [1, 8]
            for route in options.routes.split(","):
                guarded(
                    f"round trip {name} {route}",
                    lambda n=name, b=batches, r=route: round_trips(  # type: ignore[misc]
                        gpus, report, n, b, options.routings.split(","), options.passes, r
                    ),
                    failures,
                )
    if "power" not in skipped:
        guarded("idle power", lambda: idle_power(gpus, report, idle_watts), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
