"""Lanes whose devices do nothing and are done at once: what is left of a step is what its hosts do in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from crosspool.backends.cuda.chunks import chunk_ffn, chunk_half, prefill_attention
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.lane_memory import DONE


class NoKernels:
    """A launcher of a GPU like an H200 that launches nothing."""

    num_sms, is_hopper, has_warpgroups, has_clusters = 132, True, True, True

    def launch(self, source: str, kernel: str, **options: Any) -> None: ...


class _NoStream:
    cuda_stream = 0

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _DoneAtOnce:
    """A captured pass."""

    num_bytes = 0

    def __init__(self, lane: WorkerLane) -> None:
        self._memory = lane.memory

    def replay(self, stream: Any) -> None:
        self._memory._host_words[DONE] = self._memory.last_epoch


@contextmanager
def no_devices() -> Iterator[None]:
    """Lanes that are made within it have such devices."""
    plain = WorkerLane.__init__

    def made(lane: WorkerLane, *arguments: Any, **options: Any) -> None:
        plain(lane, *arguments, **options)
        lane.stream, lane.memory.device = _NoStream(), SimpleNamespace(type="cuda")

    with (
        patch.object(WorkerLane, "__init__", made),
        patch.object(WorkerLane, "_capture", lambda lane, *_: _DoneAtOnce(lane)),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
    ):
        yield


def _no_product(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """(rows, out) of whatever lies there, for a weight (out, k) or one an expert."""
    return torch.empty(x.shape[0], weight.shape[-2], dtype=x.dtype)


@contextmanager
def no_products() -> Iterator[None]:
    """Within it a piece of a prompt multiplies nothing, and no compiled attention runs."""
    with (
        patch.object(chunk_half, "linear", _no_product),
        patch.object(chunk_ffn, "linear", _no_product),
        patch.object(chunk_ffn, "linear_fp32", _no_product),
        patch.object(chunk_ffn, "grouped_linear", _no_product),
        patch.object(chunk_ffn, "linear_into", lambda *_: None),
        patch.object(prefill_attention, "expand", lambda spec, weights, slots, *_: (slots[None], slots[None])),
        patch.object(prefill_attention, "_launch", lambda *_: None),
    ):
        yield
