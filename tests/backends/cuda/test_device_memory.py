"""What the memory of a GPU is used for is named, and adds up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device import device_memory  # noqa: E402
from crosspool.backends.cuda.device.device_memory import naming_consumers, remainder  # noqa: E402
from crosspool.backends.cuda.kv_frames import frames  # noqa: E402
from crosspool.units import GiB, MiB  # noqa: E402
from tests.support.fake_vmm import FakeVmmDriver  # noqa: E402

pytestmark = pytest.mark.judge

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GiB, 140 * GiB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 101 * GiB)
    monkeypatch.setattr(device_memory, "_known_bytes", {})


def test_running_out_of_memory_names_every_consumer():
    held = {"KV cache": 100 * GiB, "attention weights of qwen": 3 * GiB}
    with (
        pytest.raises(ValueError, match="lower kv_pool_bytes") as caught,
        naming_consumers("kv0", GPU, "the attention weights of glm", lambda: held),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert str(caught.value).startswith(
        "kv0: GPU 1 has no room for the attention weights of glm: KV cache 100.0 GiB, everything else on this GPU 35.0 "
        "GiB, attention weights of qwen 3.0 GiB; 2.0 of 140.0 GiB are free"
    )


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="unrelated"), naming_consumers("kv0", GPU, "a cache", dict):
        raise RuntimeError("unrelated")


def test_kinds_add_up_to_what_the_gpu_reports_as_used():
    known = {"kv_cache": 90 * GiB, "attention_weights": 8 * GiB, "graphs": GiB, "channels": 2 * GiB}
    rest = remainder("kv0", GPU, known)
    assert rest == {"workspace": 3 * GiB, "other": 34 * GiB}
    assert sum(known.values()) + sum(rest.values()) == 138 * GiB


def test_ranks_that_share_a_process_and_a_gpu_add_up_together():
    known = {"kv0": {"kv_cache": 60 * GiB}, "w0": {"ffn_weights": 30 * GiB, "graphs": GiB}}
    first = [remainder(rank, GPU, parts) for rank, parts in known.items()]
    assert first[1] == {"workspace": 0, "other": 0}, "the first of them tells"
    rest = remainder("kv0", GPU, known["kv0"])
    assert rest == {"workspace": 11 * GiB, "other": 36 * GiB}
    used = sum(size for parts in known.values() for size in parts.values())
    assert used + sum(rest.values()) == 138 * GiB
    elsewhere = torch.device("cuda", 2)
    assert remainder("w0", elsewhere, {"ffn_weights": 100 * GiB}) == {"workspace": GiB, "other": 37 * GiB}


def test_mapped_frames_that_find_no_room_name_every_consumer_too(monkeypatch):
    driver = FakeVmmDriver(2 * MiB, max_frames=5)
    monkeypatch.setattr(frames, "CudaVmmDriver", lambda device: driver)
    site = Site("kv0", GPU, None, {}, None)
    wanted = "kv0: GPU 1 has no room for a KV cache of 1.0 GiB: everything else on this GPU 138.0 GiB; 2.0 of 140.0 GiB"
    with pytest.raises(ValueError, match=wanted):
        frames.make_frames(site, (512, 2 * MiB), "vmm")
    assert not driver.contents
    assert not driver.misuse
