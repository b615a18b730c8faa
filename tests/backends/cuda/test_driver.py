"""Driver errors name the call and the rank; hosts without a path between GPUs are found out. No GPU needed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import CudaError, Driver  # noqa: E402
from crosspool.backends.cuda.device.executable import Executable  # noqa: E402

pytestmark = pytest.mark.judge


@pytest.fixture
def driver(monkeypatch):
    """A driver whose calls do as `reachable` and `status` say."""
    success, failure = SimpleNamespace(name="CUDA_SUCCESS"), SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
    fake = ModuleType("cuda.bindings.driver")
    fake.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
    fake.reachable = {(0, 1), (1, 0)}
    fake.cuInit = lambda flags: (success,)
    fake.cuDeviceGet = lambda index: (success, index)
    fake.cuDeviceCanAccessPeer = lambda device, peer: (success, int((device, peer) in fake.reachable))
    fake.cuMemCreate = lambda *arguments: (failure, None)
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver, cuda.bindings = fake, bindings
    for name, module in (("cuda", cuda), ("cuda.bindings", bindings), ("cuda.bindings.driver", fake)):
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_a_failed_call_is_named_with_its_rank(driver):
    with pytest.raises(CudaError, match="w1: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        Driver("w1").call("cuMemCreate", 1 << 20, None, 0)


def test_gpus_that_reach_each_other_cross_directly(driver):
    devices = {"kv0": 0, "w0": 1, "w1": 0}
    site = Site("kv0", torch.device("cuda", 0), Driver("kv0"), devices, None)
    assert site.path_to("w0") == "peer"
    assert site.path_to("w1") == "peer"  # a rank on the same GPU


def test_the_host_is_asked_for_or_a_peers_memory_that_cannot_be_had(driver):
    def site(transport):
        return Site("kv0", torch.device("cuda", 0), Driver("kv0"), {"kv0": 0, "w0": 1}, None, None, transport)

    assert site("host").path_to("w0") == "host"
    assert site("peer").path_to("w0") == "peer"
    driver.reachable.clear()
    with pytest.raises(ValueError, match=r"device 0 of kv0 and device 1 of w0 .* use transport auto or host"):
        site("peer").path_to("w0")


def test_one_way_is_not_enough(driver, caplog):
    driver.reachable.discard((1, 0))
    for rank, device, peer in (("kv0", 0, "w0"), ("w0", 1, "kv0")):
        site = Site(rank, torch.device("cuda", device), Driver(rank), {"kv0": 0, "w0": 1}, None)
        assert site.path_to(peer) == "host"
    assert "go through the host" in caplog.text


@pytest.fixture
def launched(driver):
    """Handles of graphs that were launched, with their streams; and those of graphs that were let go."""
    success, driver.let_go, driver.status = driver.CUresult.CUDA_SUCCESS, [], None
    found = []
    driver.CUgraph = lambda number: ("graph", number)
    driver.cuGraphInstantiate = lambda graph, flags: (success, ("ready", graph, flags))
    driver.cuGraphLaunch = lambda handle, stream: (driver.status or success, found.append((handle, stream)))[:1]
    driver.cuGraphExecDestroy = driver.let_go.append
    return found


def test_a_captured_graph_is_made_ready_once_and_let_go_with_its_owner(driver, launched):
    graph = Executable(77, "kv0 m 4")
    for stream in (5, 6):
        graph.launch(SimpleNamespace(cuda_stream=stream))
    handle = ("ready", ("graph", 77), 0)
    assert launched == [(handle, 5), (handle, 6)]
    assert driver.let_go == []
    del graph
    assert driver.let_go == [handle]


def test_a_graph_that_cannot_be_launched_says_why(driver, launched):
    graph = Executable(77, "kv0 m 4")
    driver.status = SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(CudaError, match="cuGraphLaunch of kv0 m 4 failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        graph.launch(SimpleNamespace(cuda_stream=5))
