"""Which steps a weights rank's FFN server takes, and which it leaves to launched kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.steps.lane import WorkerLane  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import DONE, WaitRule  # noqa: E402
from crosspool.backends.cuda.weights_rank import ffn_worker  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker  # noqa: E402
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.support.fake_backend import FakeModel  # noqa: E402

pytestmark = pytest.mark.judge

SITE = Site("w0", torch.device("cpu"), Driver("w0"), {"w0": 0, "kv0": 0}, None)


class Rank:
    """A server that is told to leave, and two lanes."""

    def __init__(self, monkeypatch):
        self.resident = ResidentFFN(SITE, EmulatedKernels())
        self.num_stops = 0
        monkeypatch.setattr(self.resident._server, "stop", self.stop)
        self.lanes = [WorkerLane(SITE, WaitRule(), EmulatedKernels()) for _ in range(2)]

    def stop(self):
        self.num_stops += 1

    def served(self):
        return [self.resident.can_serve(lane) for lane in self.lanes]


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_launched_work_of_one_lane_keeps_the_others_from_the_server_until_it_has_ended(rank):
    rank.resident.before_launch(rank.lanes[0])
    rank.lanes[0].memory.push(1023, 3)
    assert rank.served() == [True, False]
    rank.lanes[0].memory._host[DONE] = 1026
    assert rank.served() == [True, True]


def test_the_server_leaves_for_a_load_and_stays_away_until_the_last_one_has_ended(rank):
    """Otherwise a lane that decodes without a pause would post passes on and on, and the load's kernels wait for it."""
    rank.resident._passes["m", 0, (), 1] = None
    with rank.resident.away():
        assert rank.num_stops == 1
        with rank.resident.away():
            assert rank.served() == [False, False]
        assert rank.served() == [False, False]
        assert not rank.resident.can_serve_ahead("m", 0, rank.lanes[0], 1)
    assert rank.served() == [True, True]
    assert rank.resident.can_serve_ahead("m", 0, rank.lanes[0], 1)


def test_a_load_that_fails_lets_the_server_come_back(rank, monkeypatch, tmp_path):
    worker = CudaFFNWorker(SITE, EmulatedKernels(), WaitRule(), control="resident")
    assert worker._resident is not None
    served = []

    def fails(directory):
        served.append(worker._resident.can_serve(rank.lanes[0]))
        raise ValueError("no such model")

    monkeypatch.setattr(ffn_worker, "read_model_dir", fails)
    with pytest.raises(ValueError, match="no such model"):
        worker.add_model(FakeModel().placement("m", tmp_path, ("w0",)), lambda done, total: None)
    assert served == [False], "while it loads"
    assert worker._resident.can_serve(rank.lanes[0])
