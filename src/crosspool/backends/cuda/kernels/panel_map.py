"""How the copy engine brings a layer's slots to shared memory, eight at a time, cut into panels of 128-byte rows."""

import ctypes

from crosspool.backends.cuda.device.driver import CudaError
from crosspool.backends.cuda.kernels.params import AttentionParams, WideAttentionParams
from crosspool.backends.cuda.kv_frames.cache import PagedCache

PANEL_BYTES = 128
SLOTS_A_COPY = 8
_BITS_16, _PLAIN, _EXCHANGED_128, _PROMOTE_256, _NO_FILL = 1, 0, 3, 3, 0  # the driver's enumerators


def wide_params(params: AttentionParams, cache: PagedCache, layer: int) -> WideAttentionParams:
    """params, and the map of `layer`'s slots where no eight of them cross a page."""
    has_map = cache.geometry.page_tokens % SLOTS_A_COPY == 0
    wide = WideAttentionParams(attention=params, has_map=has_map)
    if has_map:
        wide.map = panel_map(cache, layer)
    return wide


def panel_map(cache: PagedCache, layer: int) -> "ctypes.Array[ctypes.c_longlong]":
    """16 words: the driver's encoding on a GPU, elsewhere what csrc/warpgroup.cuh reads in its place. CudaError."""
    geometry = cache.geometry
    base = cache.frames.data_ptr() + geometry.offset_of_layer(layer)
    row_bytes, panels = geometry.token_layer_bytes, geometry.token_layer_bytes // PANEL_BYTES
    if not cache.frames.is_cuda:
        return (ctypes.c_longlong * 16)(base, row_bytes, geometry.frame_bytes, panels, SLOTS_A_COPY)
    storage = ctypes.create_string_buffer(192)  # the driver wants 64-byte alignment
    aligned = ctypes.addressof(storage) + -ctypes.addressof(storage) % 64
    elements = PANEL_BYTES // 2
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _BITS_16,
        4,
        ctypes.c_void_p(base),
        (ctypes.c_uint64 * 4)(elements, geometry.page_tokens, panels, len(cache.frames)),
        (ctypes.c_uint64 * 3)(row_bytes, PANEL_BYTES, geometry.frame_bytes),
        (ctypes.c_uint32 * 4)(elements, SLOTS_A_COPY, panels, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        _PLAIN,
        _EXCHANGED_128,
        _PROMOTE_256,
        _NO_FILL,
    )
    if status:
        raise CudaError(f"cuTensorMapEncodeTiled of {panels} panels of {SLOTS_A_COPY} slots failed: {status}")
    return (ctypes.c_longlong * 16).from_buffer_copy(ctypes.string_at(aligned, 128))
