"""A weights rank's steps by its resident FFN server: which may go there, and what it needs for each pass."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.channels.transport import FFNCrossing
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.moe_params import FFNScratch
from crosspool.backends.cuda.steps.lane import Links, WorkerLane, finish, on_device
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.steps.records import RunPlace
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNWay
from crosspool.backends.cuda.weights_rank.ffn_server import FFNServer, ServedPass, serve_layers


class ResidentFFN:
    """The server holds every multiprocessor, so launched kernels and it take turns.

    A lane's step is launched while another lane has launched work under way; before a launch the server leaves, once
    the passes that it has have ended. It stays away while a model loads, whose kernels and allocations would wait for
    as long as lanes decode without a pause.
    """

    def __init__(self, site: Site, kernels: Launcher) -> None:
        self._site, self._kernels = site, kernels
        self._server = FFNServer(kernels, site.device)
        self._launched: list[WorkerLane] = []
        self._num_loads, self._lock = 0, threading.Lock()
        self._passes: dict[tuple[str, int, Links, int], ServedPass] = {}
        self._scratch: dict[tuple[str, int], FFNScratch] = {}

    @contextmanager
    def away(self) -> Iterator[None]:
        """While a model loads, in a thread of its own: steps are launched. The passes that the server has end first.

        Those are what lanes have handed over, two runs each at the most; a step that was about to be posted may follow.
        """
        with self._lock:
            self._num_loads += 1
        try:
            self._server.stop()
            yield
        finally:
            with self._lock:
                self._num_loads -= 1

    def can_serve(self, lane: WorkerLane) -> bool:
        """Whether no model loads, and no other lane has launched work that has not ended."""
        if self._num_loads:
            return False
        if self._launched:
            self._launched = [other for other in self._launched if not other.memory.is_drained]
        return all([other is lane for other in self._launched])

    def can_serve_ahead(self, model: str, lane_number: int, lane: WorkerLane, rows: int) -> bool:
        """Whether the model's pass may be posted at once, behind passes of the lane that are here already."""
        is_made = any((name, at, count) == (model, lane_number, rows) for name, at, _, count in tuple(self._passes))
        return is_made and self.can_serve(lane) and lane not in self._launched

    def before_launch(self, lane: WorkerLane) -> None:
        """Kernels of this lane are about to be launched: give them the GPU."""
        self._server.stop()
        if lane not in self._launched:
            self._launched.append(lane)

    def post(
        self,
        way: FFNWay,
        rows: int,
        base: int,
        *,
        place: RunPlace | None = None,
        num_steps: int = 1,
    ) -> None:
        """One pass of `rows` rows, whose layers are computed as their rows, and maybe their experts, arrive.

        place: of its step in a run. num_steps: passes, one for each step of the run from there on.
        """
        key = (way.model_name, way.lane_number, way.links, rows)
        served = self._passes.get(key)
        if served is None:
            self._server.stop()  # what fills new buffers needs the GPU
            served = self._passes[key] = self._make(way, rows)
        self._server.post(way.lane.memory, served, base, place, num_steps)

    def prepare(self, way: FFNWay, rows: Sequence[int]) -> None:
        """Make the passes of so many rows each, so that no later one has to: for that the server leaves."""
        self._server.stop()
        for count in rows:
            served = self._passes[way.model_name, way.lane_number, way.links, count] = self._make(way, count)
            self._server.reserve(served.smem_bytes)

    def drop(self, model: str | None = None, links: Sequence[Any] = ()) -> None:
        """Forget the passes of a model, or those over any of these links. Its passes under way are ended first."""
        self._server.stop()
        for key in tuple(self._passes):  # one by one, since a load may add to them meanwhile
            if key[0] == model or any(link in key[2] for link in links):
                del self._passes[key]
        for lane in tuple(self._scratch):
            if lane[0] == model:
                del self._scratch[lane]

    def _make(self, way: FFNWay, rows: int) -> ServedPass:
        layers = way.model.layers
        with on_device(self._site.device):
            scratch = self._scratch.get((way.model_name, way.lane_number))
            if scratch is None:
                scratch = FFNScratch.for_layers(list(layers), PASS_TOKENS, self._site.device)
                self._scratch[way.model_name, way.lane_number] = scratch
            crossing = FFNCrossing(self._kernels, way.lane.memory, way.links[0].map())
            served = serve_layers(layers, crossing, rows, scratch, takes_choices=way.model.takes_choices)
            finish(self._site.device)
        return served
