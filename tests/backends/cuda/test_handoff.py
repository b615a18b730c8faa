"""How the two ends of a link find each other's memory: no GPU needed."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import sys
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels import handoff  # noqa: E402
from crosspool.backends.cuda.channels.link import DeviceLink, Site  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.kv_frames import shared_arena  # noqa: E402
from crosspool.backends.cuda.steps.passes import BUCKETS, PASS_TOKENS, bucket_of, max_passes, passes  # noqa: E402
from crosspool.cluster.channel import link_bytes  # noqa: E402
from crosspool.cluster.region import ArrayRegion, FileRegion  # noqa: E402
from crosspool.scheduler.step import epoch  # noqa: E402

pytestmark = pytest.mark.judge


def test_an_offer_is_found_as_it_was_published():
    region = ArrayRegion(256).map()
    assert handoff.find(region) is None
    offer = handoff.Offer(os.getpid(), 3, 1 << 44, 4096, b"k" * 16, "crosspool-1-2")
    handoff.publish(region, offer)
    assert handoff.find(region) == offer
    assert offer.is_of_this_process
    assert handoff.RECORD_BYTES <= 128  # a channel of the smallest model has room for it


def test_a_descriptor_reaches_another_process_that_shows_its_key():
    server = handoff.DescriptorServer()
    file = FileRegion.create(64)
    file.map()[:5] = b"hello"
    offer = handoff.Offer(os.getpid(), 0, 0, 64, server.offer(os.dup(file.fd)), server.name)
    code = (
        "import mmap, sys; from crosspool.backends.cuda.channels import handoff\n"
        f"fd = handoff.fetch({offer!r})\n"
        "print(mmap.mmap(fd, 64)[:5])".replace("Offer(", "handoff.Offer(")
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "b'hello'"


def test_a_wrong_or_withdrawn_key_gets_nothing():
    server = handoff.DescriptorServer()
    file = FileRegion.create(64)
    key = server.offer(os.dup(file.fd))
    wrong = handoff.Offer(os.getpid(), 0, 0, 64, b"x" * 16, server.name)
    with pytest.raises(ConnectionError, match="no longer offers"):
        handoff.fetch(wrong)
    server.withdraw(key)
    with pytest.raises(ConnectionError, match="no longer offers"):
        handoff.fetch(handoff.Offer(os.getpid(), 0, 0, 64, key, server.name))


class FailsOnce:
    """A socket whose next `accept` fails, as where a process has no descriptor left."""

    def __init__(self, whole):
        self.whole, self.failures = whole, [OSError(errno.EMFILE, "too many open files")]

    def accept(self):
        if self.failures:
            raise self.failures.pop()
        return self.whole.accept()


def test_a_peer_that_could_not_be_taken_leaves_the_server_to_others(caplog):
    server = handoff.DescriptorServer()
    file = FileRegion.create(64)
    offer = handoff.Offer(os.getpid(), 0, 0, 64, server.offer(os.dup(file.fd)), server.name)
    server._socket = failing = FailsOnce(server._socket)
    for _ in range(2):  # the first one by the `accept` that waits already
        os.close(handoff.fetch(offer))
    assert failing.failures == []
    assert "no peer could be taken" in caplog.text


def test_a_link_is_open_once_both_ends_are():
    def site(rank):
        return Site(rank, torch.device("cpu"), Driver(rank), {"kv0": 0, "w0": 1}, None)

    region = ArrayRegion(link_bytes(256)).map()
    kv = DeviceLink(site("kv0"), "w0", region, 256, is_kv=True)
    assert not kv.is_open()
    weights = DeviceLink(site("w0"), "kv0", region, 256, is_kv=False)
    assert kv.is_open()
    assert weights.is_open()
    assert kv.map().outbox == weights.map().inbox
    assert weights.map().outbox == kv.map().inbox
    assert kv.map().inbox.base % 128 == 0


def test_passes_cover_a_step_and_stay_within_its_epochs():
    for num_layers in (1, 27, 48, 94):
        most = max_passes(num_layers) * PASS_TOKENS
        for num_tokens in {1, 2, 31, 32, 33, 100, most}:
            plan = passes(min(num_tokens, most), 7, num_layers)
            assert [part.start for part in plan] == [0, *(part.stop for part in plan[:-1])]
            assert plan[-1].stop == min(num_tokens, most)
            assert plan[0].base + 1 == epoch(7, 0)
            assert all(b.base - a.base == num_layers for a, b in pairwise(plan))
            assert plan[-1].base + num_layers < epoch(8, 0)
            assert all(part.num_tokens <= part.bucket in BUCKETS for part in plan)
        with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
            passes(most + 1, 7, num_layers)
    assert [bucket_of(count) for count in (1, 2, 3, 5, 9, 17, 32)] == [1, 2, 3, 6, 12, 20, 32]


def test_a_named_server_gives_its_descriptor_to_whoever_knows_the_key(tmp_path):
    """How processes of a GPU share one arena: no region tells them of each other, only name and token."""
    name, key = f"crosspool-test-{secrets.token_hex(8)}", secrets.token_bytes(16)
    server = handoff.DescriptorServer(name)
    path = tmp_path / "memory"
    path.write_bytes(b"frames")
    given = os.open(path, os.O_RDONLY)
    assert server.offer(given, key) == key
    fd = handoff.fetch(handoff.Offer(0, 0, 0, 6, key, name))
    assert os.read(fd, 6) == b"frames"
    os.close(fd)
    with pytest.raises(ConnectionError):
        handoff.fetch(handoff.Offer(0, 0, 0, 6, secrets.token_bytes(16), name))
    server.withdraw(key)


def test_an_arena_whose_owner_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(shared_arena, "OWNER_TIMEOUT_S", 0.0)
    with pytest.raises(ValueError, match=r"kv0\.0 did not make the KV memory that this rank shares"):
        shared_arena._fetch(handoff.Offer(0, 0, 0, 6, secrets.token_bytes(16), "crosspool-nobody"), "kv0.0")
