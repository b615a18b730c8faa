"""How many GPUs this process could use. No torch in here: a deployment asks before it starts any rank."""

import ctypes

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def count_gpus() -> int | None:
    """Those that CUDA_VISIBLE_DEVICES leaves, or all; None where no driver tells.

    No memory on a GPU is taken. Starts the driver in this process.
    """
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return 0
    count = ctypes.c_int()
    if status != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    return count.value
