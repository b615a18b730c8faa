"""Drives one FFN server from another GPU: rows out, sums back, layer after layer (`csrc/ffn_client.cu`)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.split_model import Gpus, Side, open_links
from crosspool.backends.cuda.channel_map import LinkMap
from crosspool.backends.cuda.ffn_server import IDLE_S, FFNServer, serve_layers
from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.lane_memory import WaitRule
from crosspool.backends.cuda.moe_params import FFNScratch
from crosspool.backends.cuda.transport import FFNCrossing
from crosspool.backends.cuda.transport_params import Flags, LaneView
from crosspool.models.spec import MoEFFNSpec

_RANKS = 4
STEP = 1024


class ClientParams(ctypes.Structure):
    _fields_ = [
        ("view", LaneView),
        ("flags", Flags),
        ("answers", Flags),
        ("slots", ctypes.c_void_p * _RANKS * 2),
        ("sums", ctypes.c_void_p * _RANKS * 2),
        *((name, ctypes.c_void_p) for name in ("rows", "received", "times")),
        ("first_base", ctypes.c_ulonglong),
        *((name, ctypes.c_int) for name in ("passes", "layers", "row_bytes", "values")),
        *((name, ctypes.c_uint) for name in ("pause_mask", "pause_ns")),
        ("are_words", ctypes.c_int),
    ]


class FFNClient:
    """GPU 0 asks, a server on GPU 1 answers; `rows` (layers, batch, hidden) are what each layer of a pass is sent.

    takes_choices: under `route: kv`; `choose` must have been called before a run.
    """

    def __init__(
        self,
        gpus: Gpus,
        layers: Sequence[FFNLayerWeights],
        batch: int,
        *,
        seed: int,
        idle_s: float = IDLE_S,
        takes_choices: bool = False,
    ) -> None:
        self.batch, self.layers, self._gpus = batch, tuple(layers), gpus
        self._choices: list[torch.Tensor] = []
        here, there = gpus.devices[:2]
        self._blocks = 1 if here == there else batch  # as attention's last kernels have; a server leaves room for one
        hidden = layers[0].hidden
        rule = WaitRule(deadline_s=1.0)
        self._kv, self._side = Side.on(gpus.kernels[0], rule), Side.on(gpus.kernels[1], rule)
        (self._link,), self._kept = open_links(here, [there], (2 * batch + 32) * hidden)
        generator = torch.Generator(device=here).manual_seed(seed)
        rows = torch.randn(len(layers), batch, hidden, device=here, generator=generator)
        self.rows = rows.bfloat16()
        self._received = torch.empty(len(layers), batch, hidden, dtype=torch.float32, device=here)
        with torch.cuda.device(there):
            crossing = FFNCrossing(gpus.kernels[1], self._side.lane, LinkMap(self._link.outbox, self._link.inbox))
            scratch = FFNScratch.for_layers(list(layers), batch, there)
            self._served = serve_layers(layers, crossing, batch, scratch, takes_choices=takes_choices)
            self._server = FFNServer(gpus.kernels[1], there, [self._side.lane], idle_s=idle_s)
        self._base = 0
        self._expected: torch.Tensor | None = None
        for device in (here, there):
            torch.cuda.synchronize(device)

    def choose(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """What a router on the KV rank would send with the next layer's rows: (batch, top_k) int32 and fp32."""
        here = self._gpus.devices[0]
        parts = [ids.to(here).view(torch.uint8).flatten(), weights.to(here).view(torch.uint8).flatten()]
        self._choices.append(torch.cat([*parts, torch.zeros(16 + 4 * self.batch, dtype=torch.uint8, device=here)]))

    def _sent(self) -> torch.Tensor:
        """(layers, bytes): what a put of each layer copies to its slot."""
        rows = self.rows.view(torch.uint8).flatten(1)
        if self._choices:
            rows = torch.cat([rows, torch.stack(self._choices)], dim=1)
        return rows[:, : rows.shape[1] // 16 * 16].contiguous()

    def run(self, passes: int, *, pause_mask: int = 0) -> list[float]:
        """Microseconds of a round trip, a mean over each pass's layers; the first three passes are left out."""
        warm_up = 3 if passes > 3 else 0
        total, layers = passes + warm_up, len(self.layers)
        times = torch.zeros(total + 1, dtype=torch.int64, device=self._gpus.devices[0])
        self._received.fill_(float("nan"))
        first = self._base + STEP
        link, sent = self._link, self._sent()
        params = ClientParams(
            view=self._kv.lane.view(),
            flags=Flags.at([link.outbox.flag]),
            answers=Flags.at([link.inbox.flag]),
            rows=sent.data_ptr(),
            received=self._received.data_ptr(),
            times=times.data_ptr(),
            first_base=first,
            passes=total,
            layers=layers,
            row_bytes=sent.shape[1],
            values=self._received[0].numel(),
            pause_mask=pause_mask,
            are_words=link.inbox.fits_words(self.batch, self.layers[0].hidden),
        )
        for parity in range(2):
            params.slots[parity][0] = link.outbox.slot(parity)
            hidden = self.layers[0].hidden
            sums = link.inbox.words(parity, self.batch, hidden) if params.are_words else None
            params.sums[parity][0] = link.inbox.slot(parity) if sums is None else sums.address
        for number in range(total):
            self._base += STEP
            while self._base - self._side.lane.done_epoch > STEP * 60:  # the ring holds 64 passes
                time.sleep(0)
            self._server.post(self._side.lane, self._served, self._base)
            if number == min(total, 50) - 1:
                with torch.cuda.stream(self._kv.stream):
                    self._kv.stream.wait_stream(torch.cuda.default_stream(self._gpus.devices[0]))
                    self._kv.kernels.launch(
                        "ffn_client", "ffn_client", grid=(self._blocks, 1, 1), threads=512, smem_bytes=0, params=params
                    )
        self._kv.stream.synchronize()
        if self._kv.lane.late_epoch(0) or self._side.lane.late_epoch(0):
            raise RuntimeError(
                f"late: client {self._kv.lane.late_epoch(0)}, server {self._side.lane.late_epoch(0)} of {self._base}"
            )
        stamps = times.tolist()
        means = [(end - begin) / 1e3 / layers for begin, end in pairwise(stamps)]
        return means[warm_up:]

    def differs(self) -> bool:
        """Whether the last pass's sums are not those of the first look."""
        if self._expected is None:
            self._expected = self._received.clone()
            return not bool(self._received.isfinite().all())
        return not torch.equal(self._received, self._expected)

    def error(self) -> float:
        """Largest relative error of a layer's sums against float64 products of the experts that the server chose."""
        self._server.stop()
        there = self._gpus.devices[1]
        worst = 0.0
        with torch.cuda.device(there):
            for idx, layer in enumerate(self.layers):
                x = self.rows[idx].to(there)
                expected = reference(layer, x)
                got = self._received[idx].to(there).double()
                worst = max(worst, float((got - expected).norm() / expected.norm()))
        return worst

    def close(self) -> None:
        self._server.stop()


def reference(layer: FFNLayerWeights, x: torch.Tensor) -> torch.Tensor:
    """The layer's FFN of x in float64, experts chosen from fp32 logits as the three models choose them."""
    spec = layer.spec
    assert isinstance(spec, MoEFFNSpec)
    assert layer.router is not None
    assert layer.gate_up is not None
    assert layer.down is not None
    logits = x.double() @ layer.router.weight[: spec.num_experts].double().T
    scores = logits.softmax(-1) if spec.router.score != "sigmoid" else logits.sigmoid()
    choice = scores if layer.router.choice_bias is None else scores + layer.router.choice_bias.double()
    ids = choice.topk(spec.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if spec.router.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * spec.router.scale
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (layer.gate_up[expert].double() @ x[token].double()).chunk(2)
            act = torch.nn.functional.silu(gate) * up
            out[token] += weight * (layer.down[expert].double() @ act)
    if layer.shared_down is not None:
        assert layer.shared_gate is not None
        assert layer.shared_up is not None
        act = torch.nn.functional.silu(x.double() @ layer.shared_gate.double().T) * (
            x.double() @ layer.shared_up.double().T
        )
        out += act @ layer.shared_down.double().T
    return out
