"""The CUDA driver of mapped frames: calls reach cuda-bindings with its signatures, and memory lies on its device."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.device.device_bytes import DeviceBytes
from crosspool.backends.cuda.kv_frames.vmm import CudaVmmDriver
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.units import MiB
from tests.support.fake_vmm import FakeVmmDriver

pytestmark = pytest.mark.judge

FRAME = 2 * MiB


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVmmDriver:
    """cuda-bindings' driver module, its memory calls those of the fake."""
    fake = FakeVmmDriver(FRAME)
    module = ModuleType("cuda.bindings.driver")
    for name in ("AddressReserve", "AddressFree", "Create", "Release", "Map", "SetAccess", "Unmap"):
        setattr(module, f"cuMem{name}", getattr(fake, f"cuMem{name}"))
    for name in ("CUmemLocation", "CUmemAllocationProp", "CUmemAccessDesc"):
        setattr(module, name, SimpleNamespace)
    module.CUmemLocationType = IntEnum("CUmemLocationType", {"CU_MEM_LOCATION_TYPE_DEVICE": 1})
    module.CUmemAllocationType = IntEnum("CUmemAllocationType", {"CU_MEM_ALLOCATION_TYPE_PINNED": 1})
    module.CUmemAccess_flags = IntEnum("CUmemAccess_flags", {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3})
    bindings = ModuleType("cuda.bindings")
    bindings.driver = module
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return fake


def test_a_backing_runs_over_it(fake: FakeVmmDriver) -> None:
    backing = VmmBacking(CudaVmmDriver(device=3), 13, FRAME, has_thread=False)
    frames = backing.add_model("a", 4)
    assert backing.spots("a", 1, [(5, 1, 9, 2)], is_decode=False) == ((1, 2, 3, 4),)
    fake.write(frames.base + 2 * FRAME, "second")
    assert fake.read(frames.base + 2 * FRAME) == "second"
    backing.close()
    assert not fake.misuse
    assert not fake.contents
    assert not fake.reserved


def test_memory_lies_on_its_device_and_is_readable_and_writable(fake: FakeVmmDriver) -> None:
    driver = CudaVmmDriver(device=3)
    properties = driver.allocation_properties()
    assert (properties.location.type, properties.location.id, properties.type) == (1, 3, 1)
    (access,) = driver.access_descriptors()
    assert (access.location.id, access.flags) == (3, 3)


def test_a_range_is_device_memory_of_its_frames() -> None:
    found = DeviceBytes(1 << 40, (7, FRAME)).__cuda_array_interface__
    assert found == {"shape": (7, FRAME), "typestr": "|u1", "data": (1 << 40, False), "version": 3}
