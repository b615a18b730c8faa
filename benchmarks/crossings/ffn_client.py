"""Drives FFN servers from another GPU: rows out, sums back, layer after layer (`csrc/ffn_client.cu`)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.split_model.model import Gpus, Side, open_links
from crosspool.backends.cuda.channels.channel_map import LinkMap
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.channels.transport_params import Flags, LaneView
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.weights_rank.ffn_server import IDLE_S, FFNServer, ServedPass, serve_layers
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
        *((name, ctypes.c_void_p) for name in ("rows", "received", "expected", "wrong", "times")),
        ("first_base", ctypes.c_ulonglong),
        *((name, ctypes.c_int) for name in ("passes", "layers", "row_bytes", "values")),
        *((name, ctypes.c_uint) for name in ("pause_mask", "pause_ns")),
        ("are_words", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Served:
    """One server: its slice of every layer, and what answers."""

    layers: tuple[FFNLayerWeights, ...]
    side: Side
    server: FFNServer
    passes: ServedPass


class FFNClient:
    """GPU 0 asks, a server for each slice answers: on GPU 1, and so on; `rows` (layers, batch, hidden) are what each
    layer of a pass is sent.

    takes_choices: under `route: kv`; `choose` must have been called before a run.
    """

    def __init__(
        self,
        gpus: Gpus,
        slices: Sequence[Sequence[FFNLayerWeights]],
        batch: int,
        *,
        seed: int,
        idle_s: float = IDLE_S,
        takes_choices: bool = False,
    ) -> None:
        """slices: one a server; `gpus` has its GPU behind the client's, which may be the same."""
        self.batch, self._gpus = batch, gpus
        self._choices: list[torch.Tensor] = []
        here, servers = gpus.devices[0], gpus.devices[1 : len(slices) + 1]
        self._blocks = 1 if here in servers else batch  # as attention's last kernels have; a server leaves room for one
        self._hidden, self._num_layers = slices[0][0].hidden, len(slices[0])
        self._rule = WaitRule(deadline_s=1.0)
        self._kv = Side.on(gpus.kernels[0], self._rule)
        self._links, self._kept = open_links(here, servers, (2 * batch + 32) * self._hidden)
        generator = torch.Generator(device=here).manual_seed(seed)
        rows = torch.randn(self._num_layers, batch, self._hidden, device=here, generator=generator)
        self.rows = rows.bfloat16()
        self._received = torch.empty(rows.shape, dtype=torch.float32, device=here)
        self._served = [
            self._serve(number + 1, link, tuple(layers), idle_s, takes_choices)
            for number, (link, layers) in enumerate(zip(self._links, slices, strict=True))
        ]
        self._base = 0
        self._expected: torch.Tensor | None = None
        self._wrong = torch.zeros(1, dtype=torch.int64, device=here)
        for device in gpus.devices:
            torch.cuda.synchronize(device)

    def _serve(
        self, gpu: int, link: LinkMap, layers: tuple[FFNLayerWeights, ...], idle_s: float, takes_choices: bool
    ) -> Served:
        device, kernels = self._gpus.devices[gpu], self._gpus.kernels[gpu]
        side = Side.on(kernels, self._rule)
        with torch.cuda.device(device):
            crossing = FFNCrossing(kernels, side.lane, LinkMap(link.outbox, link.inbox))
            scratch = FFNScratch.for_layers(list(layers), self.batch, device)
            passes = serve_layers(layers, crossing, self.batch, scratch, takes_choices=takes_choices)
            return Served(layers, side, FFNServer(kernels, device, [side.lane], idle_s=idle_s), passes)

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
        """Microseconds of a round trip, a mean over each pass's layers; the first three passes are left out.

        pause_mask: random pauses before every put. Once `expect` was called, the sums of every round are compared.
        """
        warm_up = 3 if passes > 3 else 0
        total, layers, hidden = passes + warm_up, self._num_layers, self._hidden
        times = torch.zeros(total + 1, dtype=torch.int64, device=self._gpus.devices[0])
        self._received.fill_(float("nan"))
        first = self._base + STEP
        links, sent = self._links, self._sent()
        params = ClientParams(
            view=self._kv.lane.view(),
            flags=Flags.at([link.outbox.flag for link in links]),
            answers=Flags.at([link.inbox.flag for link in links]),
            rows=sent.data_ptr(),
            received=self._received.data_ptr(),
            expected=None if self._expected is None else self._expected.data_ptr(),
            wrong=self._wrong.data_ptr(),
            times=times.data_ptr(),
            first_base=first,
            passes=total,
            layers=layers,
            row_bytes=sent.shape[1],
            values=self._received[0].numel(),
            pause_mask=pause_mask,
            are_words=links[0].inbox.fits_words(self.batch, hidden),
        )
        for parity in range(2):
            for rank, link in enumerate(links):
                params.slots[parity][rank] = link.outbox.slot(parity)
                sums = link.inbox.words(parity, self.batch, hidden) if params.are_words else None
                params.sums[parity][rank] = link.inbox.slot(parity) if sums is None else sums.address
        for number in range(total):
            self._base += STEP
            for served in self._served:
                while self._base - served.side.lane.done_epoch > STEP * 60:  # the ring holds 64 passes
                    time.sleep(0)
                served.server.post(served.side.lane, served.passes, self._base)
            if number == min(total, 50) - 1:
                with torch.cuda.stream(self._kv.stream):
                    self._kv.stream.wait_stream(torch.cuda.default_stream(self._gpus.devices[0]))
                    self._kv.kernels.launch(
                        "ffn_client", "ffn_client", grid=(self._blocks, 1, 1), threads=512, smem_bytes=0, params=params
                    )
        self._kv.stream.synchronize()
        late = [side.lane.late_epoch(0) for side in (self._kv, *(served.side for served in self._served))]
        if any(late):
            raise RuntimeError(f"late: client {late[0]}, servers {late[1:]} of {self._base}")
        stamps = times.tolist()
        means = [(end - begin) / 1e3 / layers for begin, end in pairwise(stamps)]
        return means[warm_up:]

    def expect(self) -> None:
        """From now on every round's sums have to be those of the last pass, bit for bit."""
        self._expected = self._received.clone()
        assert bool(self._expected.isfinite().all())

    @property
    def num_wrong(self) -> int:
        """Sums that were not as expected, of all rounds."""
        return int(self._wrong.item())

    def error(self) -> float:
        """Largest relative error of a layer's sums against the slices' FFNs in float64."""
        here = self._gpus.devices[0]
        worst = 0.0
        for idx, received in enumerate(self._received):
            expected = torch.zeros(received.shape, dtype=torch.float64, device=here)
            for gpu, served in zip(self._gpus.devices[1:], self._served, strict=False):
                with torch.cuda.device(gpu):
                    expected += reference(served.layers[idx], self.rows[idx].to(gpu)).to(here)
            worst = max(worst, float((received.double() - expected).norm() / expected.norm()))
        return worst

    def close(self) -> None:
        for served in self._served:
            served.server.stop()


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
