"""Parameters of the kernels in `csrc/exchange.cu`, field by field; a launch on the emulator compares the sizes."""

import ctypes

from crosspool.backends.cuda.channels.transport_params import Flags, LaneView, Slots
from crosspool.backends.cuda.kernels.params import CacheView

_P, _I = ctypes.c_void_p, ctypes.c_int


class ExchangePutParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("flags", Flags),
        ("slots", Slots),
        *((name, _P) for name in ("q", "rows")),
        ("cache", CacheView),
        ("own_slots", _P),
        *((name, _I) for name in ("tokens", "q_bytes", "row_bytes", "layer")),
    ]


class ExchangeTakeParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("flags", Flags),
        ("rows", _P),
        ("cache", CacheView),
        ("own_slots", _P),
        *((name, _I) for name in ("row_bytes", "layer")),
    ]


class MergeParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("wait_for", Flags),
        ("raise_for", Flags),
        ("parts", Slots),
        *((name, _P) for name in ("partial_o", "partial_ml", "sinks", "out", "part")),
        *((name, _I) for name in ("num_parts", "tokens", "heads", "splits", "value_dim", "layer")),
    ]
