"""Simulated lone steps: every row of a batch has the context, and the table holds what was kept."""

from __future__ import annotations

import pytest

from benchmarks.simulated_steps import step_ms, table
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import gpu_kind
from crosspool.simulator.cost import PooledCost


def test_every_row_of_a_batch_reads_its_context() -> None:
    cost = PooledCost(catalogue_facts("qwen3-30b-a3b"), gpu_kind("h200"), num_kv=1, num_weights=1)
    empty, full = step_ms(cost, (1, 8), 0), step_ms(cost, (1, 8), 4096)
    assert full[1] - empty[1] == pytest.approx(8 * (full[0] - empty[0]))
    # 96 KiB of KV a token at some 4.25 TB/s: 0.1 ms a row of 4,096 tokens
    assert full[0] - empty[0] == pytest.approx(4096 * 96 * 1024 / 4.25e9, rel=0.15)


def test_steps_that_were_not_measured_are_dashes() -> None:
    rows = table({}, {"decode_ms.qwen3-30b-a3b.1+1.b2.4k.fused.p50": 4.126}).splitlines()
    qwen, glm = (next(row for row in rows if model in row) for model in ("qwen3", "glm"))
    assert qwen.endswith("| - / 4.13 / - / - |")
    assert glm.endswith("| - / - / - / - |")
    roofline, from_stages = (cell.strip() for cell in glm.split("|")[2:4])
    assert roofline == from_stages, "without measured stages the roofline stands"
