"""Whose passes may take the whole GPU of a weights rank."""

from __future__ import annotations

from crosspool.backends.cuda.fused_turns import FusedTurns


def test_no_step_is_fused_beside_a_prompts_kernels():
    turns = FusedTurns(may_fuse=True)
    turns.chunk_lanes.add(1)
    assert not turns.take(0)
    assert not turns.fused_lanes
    turns.chunk_lanes.discard(1)
    assert turns.take(0)
    assert turns.fused_lanes == {0}
    turns.end(0)
    assert not turns.fused_lanes


def test_a_rank_that_cannot_fuse_never_does():
    turns = FusedTurns(may_fuse=False)
    assert not turns.take(0)
    turns.end(0)
    assert not turns.fused_lanes
