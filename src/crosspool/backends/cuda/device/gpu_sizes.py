"""Which GPUs this process could use, and their sizes. No torch in here: a deployment asks before any rank starts."""

import ctypes

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def gpu_sizes() -> tuple[int, ...] | None:
    """Bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, in order; None where no driver tells.

    No memory on a GPU is taken. Starts the driver in this process.
    """
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return ()
    count = ctypes.c_int()
    if status != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    sizes = []
    for index in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            return None
        sizes.append(size.value)
    return tuple(sizes)
