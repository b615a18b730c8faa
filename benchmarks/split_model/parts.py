"""What a split model is measured on and against: layouts, weights drawn for them, bytes a step reads, equal logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.split_model.model import Gpus, SplitModel
from benchmarks.split_model.undivided import UndividedDecoder
from benchmarks.split_model.ways import Drawn
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.random_slices import random_ffn_slices
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.models.spec import ModelSpec, MoEFFNSpec
from crosspool.models.tensors import model_tensors, weight_bytes

COPY_TB_PER_S = 4.25
MANY_GPUS = 1 << 16
_MS_PER_BYTE = 1 / COPY_TB_PER_S / 1e9

Slices = list[tuple[int, Sequence[FFNLayerWeights]]]


def parse_layout(layout: str, num_gpus: int) -> tuple[list[int], list[float] | None]:
    """GPUs of the weights ranks and their shares: `1+2`, or `1+1s25` with 25 % on the KV GPU."""
    weights = layout.split("+")[1]
    if "s" in weights:
        count, share = (int(part) for part in weights.split("s"))
        part = (1 - share / 100) / count
        return [*range(1, count + 1), 0], [part] * count + [share / 100]
    count = int(weights)
    if count >= num_gpus:
        raise ValueError(f"layout {layout} needs {count + 1} GPUs; this machine has {num_gpus}")
    return list(range(1, count + 1)), None


@dataclass(frozen=True)
class Floor:
    """Milliseconds that a step's bytes take at copy speed: attention, FFN, and both one after the other."""

    attention: float
    ffn: float

    @property
    def step(self) -> float:
        return self.attention + self.ffn


def share_of_slowest(layout: str) -> float:
    """Of every FFN, on one weights rank."""
    owners, shares = parse_layout(layout, num_gpus=MANY_GPUS)
    return max(shares or [1 / len(owners)])


def step_floor(spec: ModelSpec, batch: int, context: int, largest_share: float) -> Floor:
    """Of the experts those that random routing is expected to choose, each read once.

    largest_share: of every FFN, on the slowest weights rank.
    """
    kv_bytes = weight_bytes(spec, "kv") - 2 * spec.vocab_size * spec.hidden_size  # of the embedding, only rows
    kv_bytes += batch * context * spec.kv_bytes_per_token("bfloat16")
    ffn_bytes = 0.0
    for tensor in model_tensors(spec):
        if tensor.pool != "weights" or tensor.layer is None:
            continue
        ffn = spec.layers[tensor.layer].ffn
        share = 1.0
        if isinstance(ffn, MoEFFNSpec) and tensor.name.startswith("expert_"):
            share -= (1 - ffn.top_k / ffn.num_experts) ** batch
        ffn_bytes += share * tensor.num_elements * (4 if tensor.name == "router" else 2) * largest_share
    return Floor(kv_bytes * _MS_PER_BYTE, ffn_bytes * _MS_PER_BYTE)


def draw(
    gpus: Gpus, name: str, spec: ModelSpec, attention: AttentionWeights, seed: int, layout: str, num_gpus: int
) -> Drawn:
    """The FFN's slices of a layout, on their GPUs."""
    owners, shares = parse_layout(layout, num_gpus)
    layers = random_ffn_slices(spec, seed, [gpus.devices[gpu] for gpu in owners], shares)
    for device in gpus.devices:
        torch.cuda.synchronize(device)
    return Drawn(name, spec, attention, list(zip(owners, layers, strict=True)))


def compare(
    gpus: Gpus, model: SplitModel, slices: Sequence[tuple[int, Sequence[FFNLayerWeights]]], context: int
) -> int:
    """Of three steps those whose split logits equal, bit for bit, GPU 0's, which runs the same slices itself."""
    device = gpus.devices[0]
    copies = [
        tuple(type(layer)(**{key: _moved(value, device) for key, value in vars(layer).items()}) for layer in layers)
        for _, layers in slices
    ]
    whole = UndividedDecoder(model.half, [FFNHalf(gpus.kernels[0], layers, model.batch) for layers in copies])
    equal = 0
    for step in range(3):
        model.rewind(context + step)
        ids = [3 + 7 * step + row for row in range(model.batch)]
        model.enqueue(ids)
        model.synchronize()
        split = model.half.logits_out.clone()
        model.half.logits_out.fill_(float("nan"))
        with torch.cuda.device(device):
            logits = whole.step()
            torch.cuda.synchronize(device)
        equal += int(torch.equal(split, logits) and bool(split.isfinite().all()))
    return equal


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "choice_bias"):  # the router's weights
        return type(value)(**{key: _moved(part, device) for key, part in vars(value).items()})
    return value
