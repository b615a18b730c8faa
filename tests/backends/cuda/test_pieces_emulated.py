"""Chunks in pieces through the CUDA workers, on the CPU, and decode that is fused but for their time."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.base import LaneLinks, NewLink  # noqa: E402
from crosspool.backends.cuda.chunks import chunk_plan  # noqa: E402
from crosspool.cluster.channel import link_bytes  # noqa: E402
from crosspool.cluster.region import ArrayRegion  # noqa: E402
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepRow  # noqa: E402
from tests.backends.cuda.worker_pair import Pair, decode_step, generate, greedy, prefill_step, prompt_of  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]


@pytest.mark.parametrize("options", [{}, {"shares": (3.0, 1.0), "num_gpus": 2}], ids=["equal", "one beside the KV"])
def test_a_chunk_in_pieces_gives_the_tokens_of_passes(directory, monkeypatch, options):
    """A prompt in one chunk of several pieces, its rest in a second one, on two weights ranks; then decode."""
    monkeypatch.setattr(chunk_plan, "PIECE_TOKENS", 16)
    prompt = prompt_of(directory, 80)
    found = []
    for limit in (32, 10**9):  # in pieces, and in passes
        monkeypatch.setattr(chunk_plan, "PASS_TOKENS", limit)
        pair = Pair(directory, 2, **options)
        whole = prefill_step(directory, prompt, 1, greedy(), num_pages=12)
        (row,) = whole.rows
        row = row._replace(token_ids=tuple(prompt[:44]), num_new_tokens=44, sample=False)
        pair.run(replace(whole, header=whole.header._replace(num_tokens=44), rows=(row,)))
        for inlet in pair.inlets.values() if limit == 32 else ():  # what passes take for words with epochs
            assert not any(ctypes.string_at(inlet.link.inbox.slot(0), 8 * 8 * directory.spec.hidden_size))
        header = StepHeader(lane=0, model="tiny", step_seq=2, phase="prefill", num_tokens=36)
        row = StepRow(sequence_id=1, token_ids=tuple(prompt[44:]), num_cached_tokens=44, num_new_tokens=36)
        (first,) = pair.run(StepDescriptor(header=header, rows=(row,)))
        (second,) = pair.run(decode_step({1: 80}, 3))
        found.append([first.token_id, second.token_id])
    assert found[0] == found[1]


def test_decode_is_fused_but_for_the_time_of_a_prompt(directory, monkeypatch):
    prompt = prompt_of(directory, 5)
    pair = Pair(directory)
    worker = pair.ffn["w0"]
    expected = generate(Pair(directory), directory, prompt, 3, greedy())
    worker._turns.may_fuse = True
    assert generate(pair, directory, prompt, 3, greedy()) == expected
    assert any(kernel.startswith("moe_fused") for kernel, _, _ in pair.kernels.launches)
    assert not worker._turns.fused_lanes

    region = ArrayRegion(link_bytes(directory.spec.hidden_size * 64)).map()
    outlet, inlet = worker.open_link(NewLink(1, "kv0", region, directory.spec.hidden_size * 64, lambda: None))
    pair.kv.open_link(NewLink(1, "w0", region, directory.spec.hidden_size * 64, lambda: None))
    worker._turns.fused_lanes.add(0)  # as if a fused pass were under way
    monkeypatch.setattr(chunk_plan, "PASS_TOKENS", 32)
    header = StepHeader(lane=1, model="tiny", step_seq=1, phase="prefill", num_tokens=40)
    chunk = worker.run(header, LaneLinks({"kv0": outlet}, {"kv0": inlet}))
    assert next(chunk).satisfied()  # its lane is idle and its link open
    before = next(chunk)
    assert not before.satisfied()
    assert worker._turns.chunk_lanes == {1}
    worker._turns.end(0)
    assert before.satisfied()
    chunk.close()
    assert not worker._turns.chunk_lanes


@pytest.mark.parametrize("segments", [1, 2, 9])
def test_a_chunk_that_was_given_up_half_way_can_be_replayed(directory, segments):
    """Its lane is free again on both ranks, though not all of its kernels were enqueued."""
    prompt = prompt_of(directory, 40)
    (expected,) = Pair(directory).run(prefill_step(directory, prompt, 1, greedy()))
    pair = Pair(directory)
    assert pair.run(prefill_step(directory, prompt, 1, greedy()), max_segments=segments) is None
    for worker_lane in (pair.kv._lanes[0], pair.ffn["w0"]._lanes[0]):
        assert worker_lane.memory.is_drained
    (found,) = pair.run(prefill_step(directory, prompt, 2, greedy()))
    assert found.token_id == expected.token_id
