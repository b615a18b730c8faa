"""NVSHMEM behind the transport's seam: how ranks become a team and take their channels' memory. No GPU, no NVSHMEM."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from crosspool.backends.cuda.channels import nvshmem, nvshmem_team
from crosspool.backends.cuda.channels.nvshmem import NvshmemLibrary, find_library
from crosspool.backends.cuda.channels.nvshmem_team import join_team
from crosspool.backends.cuda.channels.symmetric_heap import SymmetricHeap
from crosspool.cluster import make_worker
from crosspool.cluster.channel import channel_bytes, link_bytes
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.messages import Boot
from crosspool.cluster.rank_process import check_return
from crosspool.cluster.region import ArrayRegion, FileRegion

RANKS = ("kv0", "w0", "w1")


class FakeCalls:
    """Ranks in threads of this process; blocks lie a gigabyte apart. unreachable: ranks that stores do not reach."""

    def __init__(self, barrier=None, unreachable=()):
        self.barrier, self.unreachable = barrier, unreachable
        self.joined = None

    def unique_id(self):
        return secrets.token_bytes(nvshmem.ID_BYTES)

    def join(self, rank, count, unique_id):
        self.joined = (rank, count, unique_id)
        if self.barrier is not None:
            self.barrier.wait(10)

    def allocate(self, num_bytes):
        return (1 + self.joined[0]) << 30

    def address_at(self, address, rank):
        return 0 if rank in self.unreachable else address + ((rank - self.joined[0]) << 30)


def team():
    """Each rank's calls and heap, joined at once."""
    token, barrier, heaps, calls = secrets.token_hex(16), threading.Barrier(len(RANKS)), {}, {}

    def run(rank):
        calls[rank] = FakeCalls(barrier)
        heaps[rank] = SymmetricHeap(calls[rank], rank, join_team(calls[rank], rank, RANKS, token), 4096)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return token, calls, heaps


def test_all_ranks_meet_by_the_first_ones_id():
    _, calls, _ = team()
    assert [calls[rank].joined[:2] for rank in RANKS] == [(0, 3), (1, 3), (2, 3)]
    assert len({calls[rank].joined[2] for rank in RANKS}) == 1


def test_a_rank_that_comes_when_the_team_is_complete_is_told_so(monkeypatch):
    token, _, _ = team()
    monkeypatch.setattr(nvshmem_team, "TIMEOUT_S", 0.0)
    with pytest.raises(ValueError, match="kv0 did not call w1 into the NVSHMEM team"):
        join_team(FakeCalls(), "w1", RANKS, token)


def test_a_part_is_where_its_peer_finds_it_and_nobody_elses():
    _, _, heaps = team()
    parts = [heaps["w0"].take(300) for _ in range(3)]
    spans = sorted((part.base, part.base + 300) for part in parts)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(part.base % 128 == 0 for part in parts)
    assert [heaps["kv0"].at_peer("w0", part.offset) for part in parts] == [part.base for part in parts]
    parts[2].close()
    assert heaps["w0"].take(300).base not in [part.base for part in parts]  # a late put must not find others' rows


def test_a_block_that_is_used_up_is_told_with_the_remedy():
    _, _, heaps = team()
    heaps["w1"].take(4000)
    with pytest.raises(ValueError, match=r"w1: channels of 128 bytes more .* 4000 are taken; use transport peer"):
        heaps["w1"].take(128)


def test_a_peer_that_stores_do_not_reach_is_named():
    calls = FakeCalls(unreachable=(1,))
    calls.join(0, 2, b"")
    with pytest.raises(ValueError, match=r"w0's memory cannot be stored to from here.*use transport host"):
        SymmetricHeap(calls, "kv0", {"kv0": 0, "w0": 1}, 4096).at_peer("w0", 0)


@pytest.mark.judge
def test_a_link_leads_into_the_peers_part_of_its_block():
    torch = pytest.importorskip("torch")
    from crosspool.backends.cuda.channels.link import DeviceLink, Site
    from crosspool.backends.cuda.device.driver import Driver

    _, _, heaps = team()
    heaps["kv0"].take(500)  # the two have taken different parts before
    region = ArrayRegion(link_bytes(256)).map()

    def link(rank, peer, is_kv):
        devices = {"kv0": 0, "w0": 1, "w1": 2}
        site = Site(rank, torch.device("cpu"), Driver(rank), devices, None, None, "nvshmem", heaps[rank])
        return DeviceLink(site, peer, region, 256, is_kv)

    kv = link("kv0", "w0", True)
    assert not kv.is_open()
    weights = link("w0", "kv0", False)
    assert kv.is_open()
    assert weights.is_open()
    assert kv.map().outbox == weights.inbox
    assert weights.map().outbox == kv.inbox
    assert kv.inbox.base >> 30 == 1
    assert weights.inbox.base >> 30 == 2
    kv.close()


@pytest.mark.parametrize("width", [2048, 4096])
def test_a_team_has_room_for_every_lanes_channels(width):
    ranks = {"kv_ranks": ("kv0",), "weights_ranks": ("w0", "w1")}
    config = ClusterConfig(
        **ranks, num_frames=2, frame_bytes=4096, max_tokens_per_step=100, num_lanes=3, transport="nvshmem", token="ab"
    )
    found = make_worker._team(config)
    assert (found.ranks, found.token) == (("kv0", "w0", "w1"), "ab")
    calls = FakeCalls()
    calls.join(0, 3, b"")
    heap = SymmetricHeap(calls, "kv0", {}, found.num_bytes)
    for _ in range(3 * 2):
        heap.take(channel_bytes((width + 3 * 64) * 100))  # beside its row, a token's choices
    assert make_worker._team(replace(config, transport="peer")) is None


def test_a_host_that_was_lost_is_not_taken_back():
    config = ClusterConfig(num_frames=2, frame_bytes=4096, max_tokens_per_step=4, transport="nvshmem")
    again = Boot(config, 1, (), FileRegion.create(64), os.getpid(), num_launches=2)
    with pytest.raises(ValueError, match=r"w0 was lost, and NVSHMEM takes no rank back .* use transport peer"):
        check_return(again)
    check_return(replace(again, num_launches=1))
    check_return(replace(again, config=replace(config, transport="peer")))


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvshmem") / nvshmem.LIBRARY
    source = Path(__file__).with_name("fake_nvshmem.cpp")
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", path, source, "-lrt"], check=True)
    return path


RANK_SCRIPT = """
import ctypes, sys
from pathlib import Path
from crosspool.backends.cuda.channels.nvshmem import NvshmemLibrary
from crosspool.backends.cuda.channels.nvshmem_team import join_team
from crosspool.backends.cuda.channels.symmetric_heap import SymmetricHeap
library, rank, token = sys.argv[1:]
calls = NvshmemLibrary(1 << 20, Path(library))
ranks = ("kv0", "w0")
heap = SymmetricHeap(calls, rank, join_team(calls, rank, ranks, token), 1 << 20)
other = next(name for name in ranks if name != rank)
part = heap.take(4096)
ctypes.c_uint64.from_address(heap.at_peer(other, part.offset)).value = 1 + ranks.index(rank)
own = ctypes.c_uint64.from_address(part.base)
while not own.value:
    pass
print(rank, own.value)
calls._calls.forget()
"""


def test_two_processes_put_into_each_others_memory_by_the_librarys_signatures(fake_library):
    token = secrets.token_hex(16)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, str(fake_library), rank, token],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in ("w0", "kv0")
    ]
    try:
        said = [rank.communicate(timeout=30)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["w0 1", "kv0 2"]


def test_what_the_library_says_no_to_is_named(fake_library, monkeypatch):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1000")
    calls = NvshmemLibrary(1000, fake_library)
    calls.join(0, 1, calls.unique_id())
    calls._calls.forget()
    with pytest.raises(ValueError, match="nvshmemx_hostlib_init_attr failed with 7"):
        calls.join(0, 1, bytes(nvshmem.ID_BYTES))
    with pytest.raises(ValueError, match="nvshmem_calloc of 1001 bytes failed"):
        calls.allocate(1001)


def test_a_library_that_is_not_there_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(nvshmem, "VARIABLES", {})
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1")
    with pytest.raises(ValueError, match="install nvidia-nvshmem-cu13, or use transport peer"):
        NvshmemLibrary(1, tmp_path / nvshmem.LIBRARY)


def test_the_real_library_takes_our_structures(monkeypatch):
    """Where it is installed; it makes an id without a GPU."""
    path = find_library()
    if not path.is_absolute():
        pytest.skip("nvidia-nvshmem-cu13 is not installed")
    for name in nvshmem.VARIABLES:
        monkeypatch.setenv(name, nvshmem.VARIABLES[name])
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1048576")
    calls = NvshmemLibrary(1 << 20, path)
    unique_id = calls.unique_id()
    assert len(unique_id) == nvshmem.ID_BYTES
    assert int.from_bytes(unique_id[:4], "little") == (1 << 16) + nvshmem.ID_BYTES
    assert ctypes.sizeof(nvshmem._Attributes) == 144
