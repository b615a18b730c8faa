"""Sharing: prompts run beside decode on a GPU at the same time, each slower for it, rather than in turns.

On GPUs a prompt's layer is a dozen kernels on each pool that keep to a part of the multiprocessors. Each kernel of a
decode step then waits for blocks of a prompt to leave and shares the bandwidth with them, which makes its layers longer
by a time that does not grow with its rows. How long a prompt may step aside is regulated
(`backends/cuda/weights_rank/patience.py`), so a layer of a chunk takes on average at most about what it may.
"""

from dataclasses import dataclass, replace

from crosspool.planner.roofline import StageTimes
from crosspool.simulator.pipeline import Route


@dataclass(frozen=True, slots=True)
class Sharing:
    """Of one model. longer_s: what a layer of a decode step takes more while a prompt runs beside it. prompt_slower:
    time of a chunk beside decode over its time alone, as far as its patience does not allow it more.

    The defaults are those of a prompt of 4,096 tokens on two H200s beside four sequences of another model, which
    `benchmarks/results/prefill_h200-x2_2026-11-30.md` has of two pairs of models: their means. A table of measured
    stages has each model's own (`measured_files.py`).
    """

    longer_s: float = 83e-6
    prompt_slower: float = 1.44

    def decode(self, times: StageTimes) -> StageTimes:
        """Of a step that begins while a prompt is under way."""
        return times.slower(1.0 + times.num_layers * self.longer_s / times.step_s)

    def prompt(self, times: StageTimes, allowed_s: float) -> StageTimes:
        """Of a chunk that begins while decode is under way. allowed_s: what its FFN of a layer may take.

        Decode that keeps the weights GPU busy makes a chunk take all that it may.
        """
        slower = times.slower(self.prompt_slower)
        return replace(slower, ffn_s=max(slower.ffn_s, allowed_s), beside_s=0.0)


USUAL = Sharing()
"""Of models of which nothing was measured."""


def twin_stations(stations: tuple[str, ...]) -> tuple[str, ...]:
    """Behind the stations, those where prompts beside decode run."""
    return (*stations, *(f"{station}-prompts" for station in stations))


def twin_route(route: Route, num_stations: int) -> Route:
    """The same among the twins. num_stations: twins included."""
    half = num_stations // 2
    return Route(kv=route.kv + half, weights=route.weights + half, priority=route.priority)
