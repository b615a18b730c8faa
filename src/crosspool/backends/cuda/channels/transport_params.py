"""Parameters of the kernels in `csrc/transport.cu`, field by field; a test compares the sizes."""

import ctypes
from collections.abc import Sequence

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
MAX_PEERS = 8


class LaneView(ctypes.Structure):
    _fields_ = [("lane", _P), ("host", _P), ("deadline_ns", _L), ("early", _I)]


class Flags(ctypes.Structure):
    _fields_ = [("flag", _P * MAX_PEERS), ("count", _I)]

    @classmethod
    def at(cls, addresses: Sequence[int]) -> "Flags":
        return cls((_P * MAX_PEERS)(*addresses), len(addresses))


Slots = _P * MAX_PEERS


class Meeting(ctypes.Structure):
    """`Arrival` or `Departure` of a kernel; all zero: none."""

    _fields_ = [("view", LaneView), ("flags", Flags), ("layer", _I)]


class NormPutParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("flags", Flags),
        ("slots", Slots),
        *((name, _P) for name in ("residual", "norm_weight", "normed")),
        *((name, _I) for name in ("hidden", "layer")),
        ("eps", _F),
        ("raises", _I),
    ]


class WaitNormParams(ctypes.Structure):
    _fields_ = [*NormPutParams._fields_[:-1], ("are_words", _I)]


class CrossParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("wait_for", Flags),
        ("raise_for", Flags),
        ("rows", _P),
        ("slots", Slots),
        *((name, _I) for name in ("row_bytes", "wait_layer", "raise_layer")),
    ]


class SeeParams(ctypes.Structure):
    _fields_ = [("view", LaneView), ("flags", Flags), ("layer", _I)]


class AdvanceParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("flags", Flags),
        *((name, _P) for name in ("ring", "tokens", "host_tokens")),
        ("again", ctypes.c_uint64),
        *((name, _I) for name in ("rows", "ring_slots", "record_words", "run_at", "num_layers")),
    ]


class ReleaseParams(ctypes.Structure):
    _fields_ = [("flags", Flags), ("epoch", ctypes.c_uint64)]


class BeginParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("lane", "ring", "last_tokens", "token_ids", "positions", "lengths", "sampling")),
        *((name, _I) for name in ("rows", "ring_slots", "record_words")),
    ]


class EndParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        *((name, _P) for name in ("tokens", "last_tokens", "host_tokens")),
        *((name, _I) for name in ("rows", "ring_slots", "num_layers")),
    ]


class ArgmaxParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("logits", "best", "best_ids", "tickets", "tokens")),
        ("vocab", _I),
    ]


class SampleParams(ctypes.Structure):
    _fields_ = [*((name, _P) for name in ("logits", "rows", "tokens")), ("vocab", _I)]


class DelayParams(ctypes.Structure):
    _fields_ = [("nanoseconds", _L)]
