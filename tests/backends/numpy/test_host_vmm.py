"""Host memory behind CUDA's virtual memory calls: contents go with physical memory, mistakes are told."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import pytest

from crosspool.backends.numpy.host_vmm import HostStatus, HostVmmDriver
from crosspool.kv_pool.backing.driver import call
from crosspool.kv_pool.backing.vmm import VmmBacking

FRAME = mmap.PAGESIZE


@pytest.fixture
def driver():
    found = HostVmmDriver()
    yield found
    found.close()


def at(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def test_contents_go_with_the_memory_wherever_it_is_mapped(driver):
    handles = [call(driver, "cuMemCreate", FRAME, None, 0) for _ in range(2)]
    base = call(driver, "cuMemAddressReserve", 8 * FRAME, 0, 0, 0)
    for index, handle in enumerate(handles):
        call(driver, "cuMemMap", base + index * FRAME, FRAME, 0, handle, 0)
    call(driver, "cuMemSetAccess", base, 2 * FRAME, driver.access_descriptors(), 1)
    at(base).value, at(base + FRAME).value = 11, 22
    call(driver, "cuMemUnmap", base, 2 * FRAME)
    call(driver, "cuMemMap", base + 5 * FRAME, FRAME, 0, handles[1], 0)
    call(driver, "cuMemSetAccess", base + 5 * FRAME, FRAME, driver.access_descriptors(), 1)
    assert at(base + 5 * FRAME).value == 22
    call(driver, "cuMemUnmap", base + 5 * FRAME, FRAME)
    call(driver, "cuMemAddressFree", base, 8 * FRAME)
    for handle in handles:
        call(driver, "cuMemRelease", handle)


def test_mistakes_have_a_status(driver):
    assert driver.cuMemCreate(FRAME + 1, None, 0)[0] is HostStatus.CUDA_ERROR_INVALID_VALUE
    assert driver.cuMemRelease(12345) == (HostStatus.CUDA_ERROR_INVALID_VALUE,)
    base = call(driver, "cuMemAddressReserve", FRAME, 0, 0, 0)
    assert driver.cuMemMap(base, FRAME, 0, 777, 0) == (HostStatus.CUDA_ERROR_INVALID_VALUE,)
    call(driver, "cuMemAddressFree", base, FRAME)


def test_what_is_not_mapped_cannot_be_touched():
    program = (
        "import ctypes; from crosspool.backends.numpy.host_vmm import HostVmmDriver\n"
        f"base = HostVmmDriver().cuMemAddressReserve({FRAME}, 0, 0, 0)[1]\n"
        "print(ctypes.c_uint64.from_address(base).value)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode < 0


def test_a_backing_of_host_memory_moves_frames_between_models(driver):
    backing = VmmBacking(driver, 9, FRAME)
    try:
        wide, narrow = backing.add_model("wide", 4), backing.add_model("narrow", 1)
        (spot,) = backing.spots("wide", 1, [(1, 2, 3, 4)], is_decode=False)
        for index, frame in enumerate(spot):
            at(wide.base + frame * FRAME).value = 100 + index
        backing.forget([1])
        spots = backing.spots("narrow", 2, [(3,), (1,)], is_decode=False)
        assert [at(narrow.base + frame * FRAME).value for (frame,) in spots] == [102, 100]
        at(wide.base).value = 5  # frame 0 is everybody's
        assert at(narrow.base).value == 5
    finally:
        backing.close()
