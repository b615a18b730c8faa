"""Curves of decode steps, from the names of a kept result's metrics."""

from __future__ import annotations

import pytest

from benchmarks.decode_picture import curves, decode_picture


def result():
    steps = {(1, 4): 3.0, (8, 4): 9.5, (1, 128): 6.4}
    metrics = {f"decode_ms.m-1.1+1.b{batch}.{context}k.fused.p50": ms for (batch, context), ms in steps.items()}
    limits = {name: value / 2 for name, value in metrics.items()}
    others = (
        "decode_ms.m-1.1+1.b1.4k.resident.p50",
        "decode_ms.m-1.1+1s25.b1.4k.fused.p50",
        "host_us_per_step.m-1.p50",
    )
    return {"what": "decode_step", "metrics": metrics | dict.fromkeys(others, 1.0), "limits": limits}


def test_each_context_has_its_points_by_batch_and_its_limits():
    assert curves(result(), "fused") == {
        "m-1": {
            "4K": [(1.0, 3.0), (8.0, 9.5)],
            "4K bytes": [(1.0, 1.5), (8.0, 4.75)],
            "128K": [(1.0, 6.4)],
            "128K bytes": [(1.0, 3.2)],
        }
    }


def test_the_picture_names_model_and_lines():
    picture = decode_picture(result(), "fused")
    assert all(text in picture for text in ("m-1, 1+1, fused", "128K bytes", "ms a step"))
    with pytest.raises(ValueError, match="no steps of one KV GPU and one weights GPU by flags"):
        decode_picture(result(), "flags")
