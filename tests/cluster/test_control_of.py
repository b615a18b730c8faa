"""Which weights ranks may have a resident server."""

from __future__ import annotations

import pytest

from crosspool.cluster.config import ClusterConfig


def make(**changes) -> ClusterConfig:
    given = {"num_frames": 4, "frame_bytes": 4096, "max_tokens_per_step": 8, "backend": "cuda", "control": "resident"}
    return ClusterConfig(**given | changes)


def test_a_weights_rank_with_a_process_and_a_gpu_of_its_own_has_a_server():
    config = make(weights_ranks=("w0", "w1"))
    assert [config.control_of(rank) for rank in config.weights_ranks] == ["resident", "resident"]


def test_one_beside_a_kv_rank_in_its_process_has_none():
    config = make(weights_ranks=("w0", "w1"), hosts=(("kv0", "w1"),), devices=(("w0", 1), ("w1", 0)))
    assert [config.control_of(rank) for rank in config.weights_ranks] == ["resident", "graphs"]


def test_two_weights_ranks_of_one_process_have_none_on_one_gpu():
    shared = make(weights_ranks=("w0", "w1"), hosts=(("w0", "w1"),), devices=(("w0", 1), ("w1", 1)))
    assert shared.control_of("w0") == "graphs"
    assert make(weights_ranks=("w0", "w1"), hosts=(("w0", "w1"),)).control_of("w0") == "resident"


def test_a_host_that_drives_a_kv_rank_too_ends_no_server():
    """On GPUs of their own as well: it would wait for passes whose other halves it has yet to start."""
    assert make(hosts=(("kv0", "w0"),)).control_of("w0") == "graphs"


def test_ranks_of_one_gpu_in_processes_of_their_own_take_turns_there():
    assert make(devices=(("kv0", 0), ("w0", 0))).control_of("w0") == "resident"
    assert make(devices=(("kv0", 0), ("w0", 0)), layout="inprocess").control_of("w0") == "graphs"
    assert make(layout="inprocess").control_of("w0") == "resident"


@pytest.mark.parametrize("control", ["host", "graphs"])
def test_any_other_control_is_that_of_all_ranks(control):
    config = make(control=control, hosts=(("kv0", "w0"),))
    assert [config.control_of(rank) for rank in config.ranks] == [control, control]
