"""What a layout's GPUs hold, and how long one request could become in what is left: an account, nothing is served."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.full_models import full_spec
from benchmarks.layouts.runs import gpu_memory
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.units import GiB, MiB

FRAME_BYTES = 2 * MiB
RESERVE_BYTES = GiB
"""Of each GPU, which is left free."""


def held_memory(url: str) -> dict[str, Any]:
    """Bytes in use of each GPU, and the KV memory that the server hands out, by rank, with nothing being served."""
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as answer:
        stats = json.load(answer)
    pools = {pool["kv_rank"]: (pool["frames_budget"] + 1) * pool["frame_bytes"] for pool in stats["pools"]}
    return {"gpus": [{"used": used, "total": total} for _, used, total in gpu_memory()], "kv_bytes": pools}


def kv_room(memory: dict[str, Any], layout: str, models: Sequence[str]) -> dict[str, int]:
    """Bytes of KV that one request of each model could have, were all memory that is not needed otherwise KV.

    Two pools: what the first GPU has. static: an equal part of the GPU where the model lies (in turn over the GPUs);
    elastic: all of that.
    """
    gpus, kv_bytes = memory["gpus"], memory["kv_bytes"]
    kind, num_gpus = layout.split("-")[0], len(gpus)
    on_gpu = [0] * num_gpus
    for index, size in enumerate(kv_bytes.values()):
        on_gpu[0 if kind == "crosspool" else index % num_gpus] += size
    free = [gpu["total"] - gpu["used"] + held - RESERVE_BYTES for gpu, held in zip(gpus, on_gpu, strict=True)]
    if kind == "crosspool":
        return dict.fromkeys(models, free[0])
    found = {}
    for index, model in enumerate(models):
        device = index % num_gpus
        sharing = len(range(device, len(models), num_gpus)) if kind == "static" else 1
        found[model] = free[device] // sharing
    return found


def tokens_in(model: str, num_bytes: int) -> int:
    """Tokens of one request in so much KV memory, in whole pages beside frame 0."""
    spec = full_spec(model)
    tokens = choose_page_tokens(spec, FRAME_BYTES, "bfloat16")
    page = page_geometry(spec, page_tokens=tokens, frame_bytes=FRAME_BYTES, kv_dtype="bfloat16", model=model)
    return max(0, (num_bytes // FRAME_BYTES - 1) // page.frames_per_page * tokens)
