"""The resident FFN server of one device: a kernel that stays there and computes layers as their rows arrive.

The host posts a pass by one record in pinned memory; everything after that, the order of lanes included, happens on the
GPU (`csrc/ffn_server.cu`). The server leaves by itself when idle, and is launched again with the next pass.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.channels.transport_params import LaneView
from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.queues import own_stream
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.kernels.fused_layer import fused_layer
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.kernels.params import FusedParams
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.records import RECORD_WORDS, RING_SLOTS, RunPlace
from crosspool.models.spec import MoEFFNSpec
from crosspool.units import align_up

MAX_LANES = 16
IDLE_S = 0.05
"""How long a server without a pass stays before it leaves the GPU to other work."""

_THREADS = 256
_SERVED_BYTES = align_up(ctypes.sizeof(FusedParams), 128)
_OWN_SMEM_BYTES = _SERVED_BYTES + 2048  # the server's words beside a layer's
_STOP, _LEFT = 0, 1


class ServedLane(ctypes.Structure):
    _fields_ = [("view", LaneView), ("ring", ctypes.c_void_p)]


class ServerParams(ctypes.Structure):
    _fields_ = [
        ("lanes", ServedLane * MAX_LANES),
        *((name, ctypes.c_void_p) for name in ("order", "meetings", "control")),
        *((name, ctypes.c_longlong) for name in ("launch", "idle_ns")),
        *((name, ctypes.c_int) for name in ("num_lanes", "ring_slots", "record_words")),
    ]


@dataclass(frozen=True)
class ServedPass:
    """The layers of one (model, lane, rows) as the server reads them, in device memory.

    smem_bytes: what the hungriest layer needs. kept: what the layers point to.
    """

    layers: torch.Tensor
    num_layers: int
    smem_bytes: int
    kept: FFNScratch


def serve_layers(
    layers: Sequence[FFNLayerWeights],
    crossing: FFNCrossing,
    rows: int,
    scratch: FFNScratch,
    *,
    takes_choices: bool = False,
) -> ServedPass:
    """Passes of `rows` rows over a lane's crossing. `scratch` is the server's alone: its words carry its meetings.

    takes_choices: experts come with the rows, from routers on the KV rank.
    """
    built = []
    for layer, weights in enumerate(layers):
        words = crossing.words(layer, rows, weights.hidden)
        out = crossing.sums(layer, rows, weights.hidden) if words is None else words
        departure = crossing.departure(layer) if words is None else crossing.epochs(layer)
        x = crossing.rows(layer, rows, weights.hidden)
        choices = None
        if takes_choices and isinstance(weights.spec, MoEFFNSpec):
            choices = crossing.choices(layer, rows, weights.hidden, weights.spec.top_k)
        built.append(fused_layer(weights, x, out, scratch, crossing.arrival(layer), departure, choices))
    table = b"".join(bytes(layer.params).ljust(_SERVED_BYTES, b"\0") for layer in built)
    device = scratch.act.device
    memory = torch.zeros(len(table) + 128, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 128
    aligned = memory[start : start + len(table)]
    aligned.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
    return ServedPass(aligned, len(built), max(layer.smem_bytes for layer in built), scratch)


class FFNServer:
    """Serves the lanes it was given; its methods may be called from several threads."""

    def __init__(
        self, kernels: Launcher, device: torch.device, lanes: Sequence[LaneMemory] = (), *, idle_s: float = IDLE_S
    ) -> None:
        """lanes: known from the start; further ones are known from their first pass."""
        self._kernels, self._device, self._lanes = kernels, device, list(lanes)
        self._idle_s = idle_s
        self._order = torch.zeros(4, dtype=torch.int64, device=device)
        self._meetings = torch.zeros(1, dtype=torch.int64, device=device)
        self._control = pinned((2,), torch.int64, device)
        self._words = memoryview(self._control.numpy())  # quicker to read
        self._launch, self._smem_bytes = 0, 0
        self._lock = threading.Lock()
        self._stream: Any = own_stream(device) if device.type == "cuda" else None

    @property
    def has_left(self) -> bool:
        """Whether the last launch has left, or there was none."""
        launch, words = self._launch, self._words
        return launch == 0 or words[_LEFT] >= launch or words[_STOP] >= launch

    def reserve(self, smem_bytes: int) -> None:
        """Have later launches take this much shared memory, so that a pass that needs it starts no new one."""
        self._smem_bytes = max(self._smem_bytes, smem_bytes)

    def post(
        self, lane: LaneMemory, served: ServedPass, base: int, place: RunPlace | None = None, num_steps: int = 1
    ) -> None:
        """One pass of the lane: its layers are computed as their rows arrive. Launches the server where it has left.

        place: of its step in a run; the pass is skipped where that has ended early. num_steps: of `LaneMemory.post`.
        """
        with self._lock:  # a full barrier between the posted word and the look at the server's
            is_new = lane not in self._lanes
            if (is_new or served.smem_bytes > self._smem_bytes) and not self.has_left:
                self._leave()
            if is_new and len(self._lanes) == MAX_LANES:
                raise ValueError(f"an FFN server serves {MAX_LANES} lanes; open fewer, or use control graphs")
            if is_new:
                self._lanes.append(lane)
            self.reserve(served.smem_bytes)
            lane.post(base, served.num_layers, served.layers.data_ptr(), place, num_steps)
        if self.has_left:
            self._start()

    def stop(self) -> None:
        """Return once the server has left the device; passes under way are ended first."""
        with self._lock:
            if not self.has_left:
                self._leave()
            if self._stream is not None:
                self._stream.synchronize()

    def _leave(self) -> None:
        self._words[_STOP] = self._launch
        if self._stream is not None:
            self._stream.synchronize()

    def _start(self) -> None:
        with self._lock, on_stream(self._stream):
            self._launch += 1
            self._order.zero_()
            params = ServerParams(
                order=self._order.data_ptr(),
                meetings=self._meetings.data_ptr(),
                control=self._control.data_ptr(),
                launch=self._launch,
                idle_ns=int(self._idle_s * 1e9),
                num_lanes=len(self._lanes),
                ring_slots=RING_SLOTS,
                record_words=RECORD_WORDS,
            )
            for place, lane in enumerate(self._lanes):
                params.lanes[place] = ServedLane(lane.view(), lane.records.memory.data_ptr())
            self._kernels.launch(
                "ffn_server",
                "ffn_server",
                grid=(self._kernels.num_sms, 1, 1),
                threads=_THREADS,
                smem_bytes=_OWN_SMEM_BYTES + self._smem_bytes,
                params=params,
                cooperative=True,
            )
