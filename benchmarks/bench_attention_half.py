"""How long does the attention half of one layer take, from adding the FFN's output to the normed rows for the next?

    python -m benchmarks.bench_attention_half [--out DIRECTORY] [--contexts 4096] [--batches 1] [--parts]

Layers rotate, so weights and cache come from device memory. `behind_a_wait`: a kernel that spins stands for the FFN
elsewhere before every layer's first norm, and its 25 us are taken off: what is left is the way from a layer's FFN
output to the rows for the next, with all that does not depend on it loaded meanwhile. That still has the way from one
kernel to the next that only the stand-in adds (in a step the norm itself waits): `wait_us` is what such a kernel takes
in a chain of nothing else. `yielding`: the norm is a step's own that waits, whose words are there once the stand-in has
ended; only then may the kernels behind it begin, as they do unless a GPU serves one lane alone (`WaitRule.early`).
--parts: what the chain takes less without each of its kernels, at 4K and batch 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import copy_tb_per_s, guarded, replay_us, write_failures
from benchmarks.kv_pool.filled_half import filled_half
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.channels.transport_params import DelayParams, Flags, Slots, WaitNormParams
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import model_tensors

TARGETS = {"qwen3-30b-a3b": 20.0, "glm-4.7-flash": 24.0, "deepseek-v2-lite": 17.0}
NUM_LAYERS = 16
SEED = 7
WAIT_US = 25


def attention_bytes(spec: ModelSpec, context: int, batch: int) -> float:
    """Weights and cache bytes of one layer's attention half."""
    layer = spec.num_layers - 1
    weights = sum(
        tensor.num_elements for tensor in model_tensors(spec) if tensor.pool == "kv" and tensor.layer == layer
    )
    return 2.0 * (weights + batch * context * spec.layers[layer].attention.kv_elements_per_token)


def wait(kernels: DeviceKernels) -> None:
    """What stands for an FFN elsewhere."""
    params = DelayParams(WAIT_US * 1000)
    kernels.launch("transport", "delay", grid=(1, 1, 1), threads=32, smem_bytes=0, params=params)


class YieldingNorm:
    """A step's own norm behind a wait (`wait_norm`), for sums that are there."""

    def __init__(self, kernels: DeviceKernels, half: AttentionHalf, sums: torch.Tensor) -> None:
        self._kernels, self._half, self._sums = kernels, half, sums
        self._lane = LaneMemory(kernels.device, WaitRule())
        self._flag = torch.full((1,), 1 << 40, dtype=torch.int64, device=kernels.device)

    def __call__(self, layer: int) -> None:
        half = self._half
        params = WaitNormParams(
            view=self._lane.view(),
            flags=Flags.at([self._flag.data_ptr()]),
            slots=Slots(self._sums.data_ptr()),
            residual=half.residual.data_ptr(),
            norm_weight=half.norm_after_ffn(layer).data_ptr(),
            normed=half.normed.data_ptr(),
            hidden=half.spec.hidden_size,
            layer=layer,
            eps=half.spec.norm_eps,
        )
        grid = (len(half.residual), 1, 1)
        self._kernels.launch("transport", "wait_norm", grid=grid, threads=256, smem_bytes=256, params=params)


def measure_wait(report: Report, kernels: DeviceKernels) -> None:
    """The stand-in alone: each of a chain ends before the next begins to spin."""

    def work() -> None:
        for _ in range(NUM_LAYERS):
            wait(kernels)

    times = replay_us(work, units=NUM_LAYERS, replays=30, warm_up_s=0.05)
    report.samples("wait_us", times, limit=WAIT_US, note="a stand-in for an FFN elsewhere, in a chain of nothing else")
    print(f"a wait of {WAIT_US} us in a chain takes {sorted(times)[len(times) // 2]:.2f} us", flush=True)


def measure(report: Report, kernels: DeviceKernels, name: str, context: int, batch: int, tb_per_s: float) -> None:
    spec = full_spec(name, NUM_LAYERS)
    half = filled_half(kernels, kernels.device, name, NUM_LAYERS, batch, context, SEED)
    partial = torch.zeros_like(half.residual)

    def work() -> None:
        for layer in range(NUM_LAYERS):
            half.attend(layer)
            half.add(layer, [partial])

    def work_apart(add: Callable[[int], None]) -> None:
        for layer in range(NUM_LAYERS):
            half.attend(layer)
            wait(kernels)
            add(layer)

    times = replay_us(work, units=NUM_LAYERS, warm_up_s=0.05)
    floor = attention_bytes(spec, context, batch) / tb_per_s / 1e6
    metric = f"attention_half_us.{name}.{context // 1024}k.b{batch}"
    report.samples(metric, times, limit=floor, note=f"weights and cache at {tb_per_s:.2f} TB/s")
    median = sorted(times)[len(times) // 2]
    yielding = YieldingNorm(kernels, half, partial)
    behind: dict[str, float] = {}
    for way, add in (("", lambda layer: half.add(layer, [partial])), (".yielding", yielding)):
        replayed = replay_us(lambda add=add: work_apart(add), units=NUM_LAYERS, replays=30, warm_up_s=0.0)  # type: ignore[misc]
        apart = [time - WAIT_US for time in replayed]
        report.samples(f"{metric}.behind_a_wait{way}", apart, note=f"behind a wait of {WAIT_US} us, which is taken off")
        behind[way] = sorted(apart)[len(apart) // 2]
    goal = f" target {TARGETS[name]}" if (context, batch) == (4096, 1) else ""
    waits = f"behind a wait {behind['']:.2f}, that yields {behind['.yielding']:.2f}"
    print(f"{metric}: {median:.2f} us, {waits}, floor {floor:.2f}{goal}", flush=True)


@dataclass
class Without:
    """A launcher that leaves out one kernel of every layer: `skipped` of each `period` launches."""

    kernels: DeviceKernels
    period: int = 0  # 0: nothing is left out, and the names are noted
    skipped: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_sms, self.is_hopper = self.kernels.num_sms, self.kernels.is_hopper
        self.has_warpgroups, self.has_clusters = self.kernels.has_warpgroups, self.kernels.has_clusters
        self._count = 0

    def begin(self) -> None:
        """Before the first launch of a layer."""
        self._count = 0

    def launch(self, source: str, kernel: str, **options: Any) -> None:
        place, self._count = self._count, self._count + 1
        if self.period and place % self.period == self.skipped:
            return
        self.names.append(kernel)
        self.kernels.launch(source, kernel, **options)


def measure_parts(report: Report, kernels: DeviceKernels, name: str) -> None:
    """Results are worthless without a kernel, and times of the others hold: none depends on values."""
    launcher = Without(kernels)
    half = filled_half(launcher, kernels.device, name, NUM_LAYERS, 1, 4096, SEED)
    partial = torch.zeros_like(half.residual)

    def work() -> None:
        launcher.begin()
        for layer in range(NUM_LAYERS):
            half.attend(layer)
            half.add(layer, [partial])

    def median_us() -> float:
        return sorted(replay_us(work, units=NUM_LAYERS, replays=20, warm_up_s=0.02))[10]

    launcher.names.clear()
    work()
    names = launcher.names[: len(launcher.names) // NUM_LAYERS]
    whole = median_us()
    report.metric(f"attention_half_part_us.{name}.whole", whole)
    for place, kernel in enumerate(names):
        launcher.period, launcher.skipped = len(names), place
        part = whole - median_us()
        report.metric(
            f"attention_half_part_us.{name}.{place}_{kernel}", part, note="the chain less the chain without it"
        )
        print(f"{name} {place} {kernel}: {part:.2f} of {whole:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}
    tb_per_s = copy_tb_per_s()
    report = Report("attention_half", hardware="h200", config={"num_layers": NUM_LAYERS, "dtype": "bf16"}, seed=SEED)
    report.summary = "Attention half of one layer, both norms included, over a graph of rotating layers."
    report.metric("copy_tb_per_s", tb_per_s)
    if options.parts:
        report.what, report.summary = (
            "attention_half_parts",
            "What each kernel of the half adds to the chain, 4K, batch 1.",
        )
        for name in CONFIGS:
            guarded(f"{name} parts", lambda n=name: measure_parts(report, kernels, n), failures)  # type: ignore[misc]
        report.write(options.out)
        return write_failures(failures, options.out)
    guarded("wait", lambda: measure_wait(report, kernels), failures)
    for name in CONFIGS:
        for context in map(int, options.contexts.split(",")):
            for batch in map(int, options.batches.split(",")):
                work: Callable[[], None] = lambda n=name, c=context, b=batch: measure(  # type: ignore[misc]  # noqa: E731
                    report, kernels, n, c, b, tb_per_s
                )
                guarded(f"{name} {context} b{batch}", work, failures)
                torch.cuda.empty_cache()
        report.write(options.out)  # a run that is cut keeps what it had
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
