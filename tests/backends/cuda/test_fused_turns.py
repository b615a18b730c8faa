"""Whose passes may take the whole GPU of a weights rank."""

from __future__ import annotations

from crosspool.backends.cuda.weights_rank.fused_turns import FusedTurns, NoneFused


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


def test_a_prompt_waits_for_fused_steps_but_not_for_their_lanes_to_rest():
    """Two lanes that decode step after step are hardly ever idle at once."""
    turns = FusedTurns(may_fuse=True)
    gone = NoneFused(turns)
    assert turns.take(0)
    assert turns.take(1)
    turns.chunk_lanes.add(2)
    turns.end(0)
    assert not turns.take(0), "the step that follows is not fused"
    assert not gone.arrived(1)
    turns.end(1)
    assert gone.arrived(1)
