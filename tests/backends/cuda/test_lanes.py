"""The lanes of a worker, by number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.joined import JoinedLink  # noqa: E402
from crosspool.backends.cuda.steps import lanes as lanes_module  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.lanes import WorkerLanes  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.fixture
def lanes():
    return WorkerLanes(Site("w0", torch.device("cpu"), Driver("w0"), {"w0": 0}, None), WaitRule(), EmulatedKernels())


def test_a_lane_is_made_once_and_found_again(lanes):
    first = lanes[3]
    assert lanes[3] is first
    assert lanes[1] is not first
    assert lanes.numbers() == (3, 1)


def test_lanes_with_links_to_all_peers_come_in_order_of_their_numbers(lanes):
    for number, peers in ((2, ("kv0", "kv1")), (0, ("kv0",)), (1, ("kv0", "kv1"))):
        for peer in peers:
            lanes[number].links[peer] = JoinedLink()
    found = list(lanes.open_to(["kv0", "kv1"]))
    assert [(number, lane) for number, lane, _ in found] == [(1, lanes[1]), (2, lanes[2])]
    assert [links for _, _, links in found] == [tuple(lanes[number].links.values()) for number in (1, 2)]
    lanes.close_links("kv1")
    assert not list(lanes.open_to(["kv0", "kv1"]))


def test_a_lane_is_no_neighbour_of_itself(lanes):
    lanes[0]._replayed_s = lanes[1]._replayed_s = 100.0
    assert lanes.decodes_beside(lanes[0], 100.01)
    assert not lanes.decodes_beside(lanes[0], 101.0)
    lanes[1]._replayed_s = 0.0
    assert not lanes.decodes_beside(lanes[0], 100.01)
    assert lanes.decodes_beside(lanes[1], 100.01)


def test_a_chunk_beside_a_peer_on_its_gpu_keeps_to_what_it_began_with(lanes, monkeypatch):
    monkeypatch.setattr(lanes_module.time, "monotonic", lambda: 100.0)
    follows, fixed = (lanes.neighbours_of(lanes[2], is_fixed=is_fixed) for is_fixed in (False, True))
    assert (follows(), fixed()) == (False, False)
    lanes[0]._replayed_s = 100.0
    assert (follows(), fixed()) == (True, False)
    assert lanes.neighbours_of(lanes[2], is_fixed=True)(), "the next chunk sees them"


def test_only_lanes_from_the_first_prompt_lane_on_get_ready_for_chunks(monkeypatch):
    made = []

    def lane(*_, has_prompts, **__):
        made.append(has_prompts)
        return SimpleNamespace(prefill_streams=f"those of lane {len(made)}")

    monkeypatch.setattr(lanes_module, "WorkerLane", lane)
    site = Site("w0", torch.device("cpu"), Driver("w0"), {"w0": 0}, None, first_prompt_lane=2)
    worker_lanes = WorkerLanes(site, WaitRule(), EmulatedKernels())
    assert [worker_lanes[number] for number in range(4)]
    assert made == [False, False, True, True]
    assert worker_lanes.prefill_streams() == "those of lane 4"


def test_before_any_prompt_lane_is_open_a_load_gets_ready_on_streams_apart(monkeypatch):
    monkeypatch.setattr(lanes_module, "PrefillStreams", lambda *_: object())
    site = Site("w0", torch.device("cpu"), Driver("w0"), {"w0": 0}, None, first_prompt_lane=2)
    worker_lanes = WorkerLanes(site, WaitRule(), EmulatedKernels())
    assert worker_lanes[1]
    spare, captures = worker_lanes.prefill_streams(), worker_lanes.capture_streams
    assert spare is not captures, "what gets ready there would join the capture of another load"
    assert worker_lanes.prefill_streams() is spare, "they are made once, not with every load"
    assert worker_lanes.capture_streams is captures
