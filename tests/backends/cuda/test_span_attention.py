"""Graphs of a model's spans: one chunk at a time has them, also one that the host has given up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.chunks.prefill_blocks import SPAN_SIZES  # noqa: E402
from crosspool.backends.cuda.chunks.span_attention import SpanBuffers, SpanGraphs  # noqa: E402
from crosspool.backends.cuda.kv_rank.kv_chunk_run import take_graphs  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


def under_way() -> LaneMemory:
    lane = LaneMemory(CPU, WaitRule())
    lane.push(1024, 2)
    assert not lane.is_drained
    return lane


def test_a_chunk_that_was_given_up_has_its_graphs_until_the_device_has_ended_it(tmp_path, monkeypatch):
    spec = read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", tokenizer=False)).spec
    shape = spec.layers[0].attention
    graphs = SpanGraphs(shape, SpanBuffers.allocate(shape, SPAN_SIZES, CPU))
    model, lane = SimpleNamespace(spans={shape: graphs}), under_way()
    assert take_graphs(model, lane) == {shape: graphs}
    assert take_graphs(model, under_way()) == {}
    monkeypatch.setattr(LaneMemory, "done_epoch", lane.last_epoch)
    other = LaneMemory(CPU, WaitRule())
    assert take_graphs(model, other) == {shape: graphs}
    assert graphs.user is other
