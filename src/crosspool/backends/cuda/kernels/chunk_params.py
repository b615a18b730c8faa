"""Parameters of the kernels in `csrc/chunk_*.cu`, field by field; a test compares the sizes."""

import ctypes

from crosspool.backends.cuda.kernels.params import CacheView, MlaInput, RouterParams

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float


class TakeRowsParams(ctypes.Structure):
    _fields_ = [("rows", _P), ("out", _P), ("bytes", _L)]


class ChunkRouteParams(ctypes.Structure):
    _fields_ = [
        ("router", RouterParams),
        *((name, _P) for name in ("parts", "counts", "ranks")),
        ("rows", _I),
        ("num_parts", _I),
    ]


class ExpertStartsParams(ctypes.Structure):
    _fields_ = [*((name, _P) for name in ("counts", "starts", "ends")), ("experts", _I)]


class SortRowsParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "ids", "ranks", "starts", "sorted", "places", "row_experts")),
        ("hidden", _I),
        ("top_k", _I),
    ]


class ActivateParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("gate", "bias", "row_experts", "out")),
        *((name, _L) for name in ("stride", "up_offset", "rows")),
        ("width", _I),
        ("activation", _I),
    ]


class CombineRowsParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("down", "places", "ids", "weights", "bias", "shared", "shared_scale", "out")),
        ("hidden", _I),
        ("top_k", _I),
    ]


class MlaChunkParams(ctypes.Structure):
    _fields_ = [
        ("input", MlaInput),
        *((name, _P) for name in ("positions", "table_rows", "q")),
        ("cache", CacheView),
    ]


class GatherSlotsParams(ctypes.Structure):
    _fields_ = [("cache", CacheView), *((name, _P) for name in ("table_rows", "positions", "out")), ("slots", _I)]


class ScatterSlotsParams(ctypes.Structure):
    _fields_ = [("cache", CacheView), *((name, _P) for name in ("table_rows", "positions", "rows")), ("slots", _I)]


class MergePartParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("part", "log_sums", "acc", "sums")),
        *((name, _L) for name in ("row_stride", "head_stride", "log_sums_stride")),
        *((name, _I) for name in ("rows", "heads", "width", "is_first")),
    ]


class NormRowsParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "norm_weight", "out")),
        ("stride", _L),
        ("width", _I),
        ("rows", _I),
        ("eps", _F),
    ]
