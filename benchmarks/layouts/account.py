"""What each GPU of a layout would hold, from the models' shapes alone: nothing is started, and no GPU is needed.

For layouts of more GPUs than are at hand, and for a look at a plan before a machine is asked for. What a GPU holds
beside weights and KV is taken from the layouts that were measured on two H200s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.layouts.memory import kv_room, tokens_in
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.load import load_deployment
from crosspool.deployment.ranks import gpu_of, kv_bytes_of_each, kv_ranks, kv_ranks_of, weights_ranks, weights_ranks_of
from crosspool.planner.catalogue import catalogue_facts
from crosspool.units import GiB

H200_BYTES = 150_754_820_096
BESIDE_BYTES = 4 * GiB
"""Kernels, buffers and graphs, of each pool's rank and of each model of a baseline on a GPU. Seen: 3.8 GiB with a KV
rank, 2.7 with a weights rank, 3.2 to 3.9 for each model of a baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUAccount:
    """One GPU: its ranks, and bytes of what they hold."""

    ranks: tuple[str, ...]
    weights_bytes: int
    kv_bytes: int
    beside_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.beside_bytes

    def told(self, index: int, total_bytes: int = H200_BYTES) -> str:
        """One line."""
        weights, kv, beside = (size / GiB for size in (self.weights_bytes, self.kv_bytes, self.beside_bytes))
        parts = f"weights {weights:.1f}, KV {kv:.1f}, beside {beside:.1f}"
        fits = "" if self.used_bytes <= total_bytes else "  DOES NOT FIT"
        of = f"{self.used_bytes / GiB:.1f} of {total_bytes / GiB:.1f} GiB"
        return f"GPU {index}: {' '.join(self.ranks) or 'nothing'}: {parts}; {of}{fits}"


def deployment(flags: Sequence[str], models: Sequence[str]) -> DeploymentConfig:
    """The deployment of `crosspool serve`'s flags. Raises ValueError for flags that contradict each other."""
    given: dict[str, Any] = {"models": [{"path": model} for model in models]}
    rest = list(flags)
    while rest:
        name = rest.pop(0).removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            given[name.removeprefix("no_")] = False
        elif rest and not rest[0].startswith("--"):
            given[name] = rest.pop(0)
        else:
            given[name] = True
    return load_deployment(given)


def gpu_accounts(config: DeploymentConfig) -> list[GPUAccount]:
    """By GPU. Raises ValueError for a model that is not in the catalogue."""
    devices = _devices(config)
    weights, beside = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    if config.pools.baseline is None:
        beside = dict.fromkeys(devices, BESIDE_BYTES)
    for model in config.models:
        facts = catalogue_facts(model.source)
        for rank, share in _shares(model, config).items():
            weights[rank] += int(facts.ffn_bytes * share)
        for rank in kv_ranks_of(model, config):
            weights[rank] += facts.kv_pool_weight_bytes
            beside[rank] += BESIDE_BYTES if config.pools.baseline else 0
    kv = kv_bytes_of_each(config)
    found = []
    for gpu in range(config.pools.num_gpus or 1 + max(devices.values())):
        ranks = tuple(rank for rank, device in devices.items() if device == gpu)
        found.append(
            GPUAccount(
                ranks=ranks,
                weights_bytes=sum(weights[rank] for rank in ranks),
                kv_bytes=sum(kv for rank in ranks if rank in kv_ranks(config)),
                beside_bytes=sum(beside[rank] for rank in ranks),
            )
        )
    return found


def as_memory(config: DeploymentConfig) -> dict[str, Any]:
    """The account in the form in which a measurement of memory is kept (`memory.py`)."""
    gpus = [{"used": account.used_bytes, "total": H200_BYTES} for account in gpu_accounts(config)]
    return {"gpus": gpus, "kv_bytes": dict.fromkeys(kv_ranks(config), kv_bytes_of_each(config))}


def plan_lines(layout: str, flags: Sequence[str], models: Sequence[str]) -> tuple[list[str], bool]:
    """The command that serves the layout, its GPUs one by one, the longest requests; and whether all of it fits."""
    config = deployment(flags, models)
    accounts = gpu_accounts(config)
    lines = [f"{layout}: crosspool serve {' '.join(models)} {' '.join(flags)}"]
    lines += [f"  {account.told(gpu)}" for gpu, account in enumerate(accounts)]
    longest = {model: tokens_in(model, room) for model, room in kv_room(as_memory(config), layout, models).items()}
    lines.append("  one request: " + ", ".join(f"{model} {tokens:,} tokens" for model, tokens in longest.items()))
    return lines, all(account.used_bytes <= H200_BYTES for account in accounts)


def _devices(config: DeploymentConfig) -> Mapping[str, int]:
    """The GPU of each rank. Ranks of a baseline go round the GPUs."""
    if config.pools.baseline is None:
        return gpu_of(config)
    gpus = config.pools.num_gpus or config.pools.num_kv_ranks + config.pools.num_weights_ranks
    return {rank: index % gpus for group in (kv_ranks, weights_ranks) for index, rank in enumerate(group(config))}


def _shares(model: ModelConfig, config: DeploymentConfig) -> Mapping[str, float]:
    """Part of the model's FFNs on each of its weights ranks."""
    ranks = weights_ranks_of(model, config)
    widths = config.pools.weights_shares or (1.0,) * len(ranks)
    return {rank: width / sum(widths) for rank, width in zip(ranks, widths, strict=True)}
