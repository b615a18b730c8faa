"""How fast does the resident FFN server answer?

    CUDA_MODULE_LOADING=EAGER python -m benchmarks.bench_ffn_server [--out DIRECTORY] [--rounds 1000000]

Round trip: a kernel on one GPU stands where attention would be; it puts rows into the weights GPU's memory, waits for
the sums in its own, and goes on with the next layer. Layers rotate, so weights come from device memory. Decode steps
with the server are among those of `bench_decode_step`.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import time
from pathlib import Path

import torch

from benchmarks.bench_moe_layer import choose_distinct, layer_bytes
from benchmarks.ffn_client import FFNClient
from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, keep_busy, write_failures
from benchmarks.one_gpu import OneGpu
from benchmarks.report import RESULTS, Report
from benchmarks.split_model import Gpus
from benchmarks.split_parts import COPY_TB_PER_S
from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.moe import ffn
from crosspool.backends.cuda.weights import random_ffn_weights
from crosspool.models.spec import MoEFFNSpec

NUM_LAYERS = 12
SEED = 7
TARGETS = {"ffn": {1: 31.0}, "kv": {1: 27.0, 2: 45.0, 4: 82.0, 8: 158.0}}
HOPS_US = 5.5


def round_trips(
    gpus: Gpus, report: Report, name: str, batches: list[int], routings: list[str], passes: int, route: str
) -> None:
    """Medians over passes of the mean round trip of their layers, and the sums' error."""
    spec = full_spec(name, NUM_LAYERS)
    with torch.cuda.device(gpus.devices[1]):
        layers = random_ffn_weights(spec, SEED, gpus.devices[1])
    for routing in routings:
        for batch in batches:
            moe = layers[0].spec
            assert isinstance(moe, MoEFFNSpec)
            if routing == "distinct" and batch * moe.top_k > moe.num_experts:
                continue
            client = FFNClient(gpus, layers, batch, seed=SEED + batch, takes_choices=route == "kv")
            unique = prepare_routing(gpus, layers, client, routing, route)
            keep_busy(0.4)
            client.run(passes)
            times = client.run(passes)
            error = client.error()
            floor = layer_bytes(layers[0], unique) / COPY_TB_PER_S / 1e6 + HOPS_US
            suffix = "" if routing == "distinct" else ".uniform"
            report.samples(
                f"ffn_roundtrip_us.{name}.tp1.b{batch}.{route}{suffix}",
                times,
                limit=floor,
                note=f"bytes at {COPY_TB_PER_S} TB/s and two bare hops; {unique:.1f} experts a layer",
            )
            report.metric(f"ffn_roundtrip_error.{name}.b{batch}.{route}{suffix}", error, limit=2e-3)
            median = sorted(times)[len(times) // 2]
            goal = TARGETS[route].get(batch) if name.startswith("qwen3") and routing == "distinct" else None
            print(
                f"{name} b{batch} {routing}: {median:.2f} us, floor {floor:.1f}, target {goal}, error {error:.1e}",
                flush=True,
            )
            client.close()


def prepare_routing(
    gpus: Gpus,
    layers: tuple,  # type: ignore[type-arg]
    client: FFNClient,
    routing: str,
    route: str = "ffn",
) -> float:
    """Mean number of experts that a layer reads for the client's rows."""
    unique = []
    with torch.cuda.device(gpus.devices[1]):
        half = FFNHalf(gpus.kernels[1], layers, client.batch)
        out = torch.empty(client.batch, layers[0].hidden, dtype=torch.float32, device=gpus.devices[1])
        for idx, layer in enumerate(layers):
            x = client.rows[idx].to(gpus.devices[1])
            if routing == "distinct":
                choose_distinct(layer, x)
            ffn(gpus.kernels[1], layer, x, out, half.scratch)
            chosen, shape = half.scratch.routing, (client.batch, layer.spec.top_k)
            unique.append(int(chosen.num_unique.item()))
            if route == "kv":
                client.choose(chosen.topk_ids.clone().view(shape), chosen.topk_weights.clone().view(shape))
    return sum(unique) / len(unique)


def stress(gpus: Gpus, report: Report, rounds: int) -> None:
    """Random pauses before every put; the last pass's sums must still be right."""
    spec = full_spec("deepseek-v2-lite", NUM_LAYERS)
    with torch.cuda.device(gpus.devices[1]):
        layers = random_ffn_weights(spec, SEED, gpus.devices[1])
    client = FFNClient(gpus, layers, 1, seed=3)
    begin = time.perf_counter()
    done, wrong = 0, 0
    while done < rounds:
        passes = min(50, max(1, (rounds - done) // NUM_LAYERS))
        client.run(passes, pause_mask=0x1FFF)
        done += passes * NUM_LAYERS
        wrong += client.differs()
    report.metric("ffn_stress_rounds", done, note=f"random pauses; {time.perf_counter() - begin:.1f} s")
    report.metric("ffn_stress_wrong_passes", wrong, limit=0)
    print(f"stress: {done} rounds, {wrong} wrong passes, {time.perf_counter() - begin:.1f} s", flush=True)
    client.close()


def idle_power(gpus: Gpus, report: Report, before: float) -> None:
    spec = full_spec("deepseek-v2-lite", 2)
    with torch.cuda.device(gpus.devices[1]):
        layers = random_ffn_weights(spec, SEED, gpus.devices[1])
    client = FFNClient(gpus, layers, 1, seed=3, idle_s=4.0)
    client.run(1)
    time.sleep(2.0)
    resident = power_watts(1)
    client.close()
    report.metric("idle_watts.resident", resident, note="the server waits for rows")
    report.metric("idle_watts.without", before)
    print(f"idle power: {before} W without, {resident} W with the server waiting", flush=True)


def power_watts(gpu: int) -> float:
    query = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--rounds", type=int, default=100_000, help="of the stress run")
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--skip", default="", help="parts to leave out: roundtrip,stress,power")
    parser.add_argument("--routes", default="ffn,kv")
    parser.add_argument("--routings", default="uniform,distinct")
    parser.add_argument("--one-gpu", action="store_true", help="both sides on one GPU")
    parser.add_argument("--hang-seconds", type=float, default=240.0, help="give up where nothing ends")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hang_seconds, exit=True)
    gpus: Gpus = OneGpu() if options.one_gpu else Gpus(2)
    failures, skipped = dict[str, str](), options.skip.split(",") + (["power"] if options.one_gpu else [])
    idle_watts = 0.0 if options.one_gpu else power_watts(1)
    hardware = "h200" if options.one_gpu else "h200-x2"
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
    if "stress" not in skipped:
        guarded("stress", lambda: stress(gpus, report, options.rounds), failures)
    if "power" not in skipped:
        guarded("idle power", lambda: idle_power(gpus, report, idle_watts), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
