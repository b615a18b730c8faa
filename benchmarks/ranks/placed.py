"""Where a model lies whose attention one KV rank has and whose experts one weights rank."""

from __future__ import annotations

from pathlib import Path

from crosspool.cluster.base import ModelPlacement
from crosspool.units import MiB

PAGE_TOKENS, FRAME_BYTES = 256, 2 * MiB


def placed(name: str, hidden_size: int) -> ModelPlacement:
    """On kv0 and w0; weights are not read from a directory."""
    return ModelPlacement(
        name=name,
        directory=Path("."),
        hidden_size=hidden_size,
        kv_rank="kv0",
        weights_ranks=("w0",),
        page_tokens=PAGE_TOKENS,
        frame_bytes=FRAME_BYTES,
        kv_dtype="bfloat16",
    )
