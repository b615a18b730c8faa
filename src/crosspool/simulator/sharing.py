"""Sharing: prompts run beside decode on a GPU at the same time, each slower for it, rather than in turns.

On GPUs a prompt's layer is a dozen kernels on each pool that keep to a part of the multiprocessors. How long they take
is regulated (`backends/cuda/weights_rank/patience.py`), so a layer of a chunk takes about what it may, times `stretch`.
"""

from dataclasses import dataclass, replace

from crosspool.planner.roofline import StageTimes
from crosspool.simulator.pipeline import Route


@dataclass(frozen=True, slots=True)
class Sharing:
    """stretch: time of a chunk's layer beside decode, attention included, over what its FFN may take.

    decode_slower: time of a decode step that begins beside a prompt, over its time without. Both are calibrated on
    loads of three models on two H200s (`benchmarks/results/layouts_h200-x2_2026-11-30.md`), by times between tokens and
    to the first one.
    """

    stretch: float = 1.4
    decode_slower: float = 1.25

    def decode(self, times: StageTimes) -> StageTimes:
        """Of a step that begins while a prompt is under way."""
        return times.slower(self.decode_slower)

    def prompt(self, times: StageTimes, allowed_s: float) -> StageTimes:
        """Of a chunk that begins while decode is under way. allowed_s: what its FFN of a layer may take."""
        ffn_s = max(times.ffn_s, self.stretch * allowed_s - times.attention_s)
        return replace(times, ffn_s=ffn_s, beside_s=0.0)


def twin_stations(stations: tuple[str, ...]) -> tuple[str, ...]:
    """Behind the stations, those where prompts beside decode run."""
    return (*stations, *(f"{station}-prompts" for station in stations))


def twin_route(route: Route, num_stations: int) -> Route:
    """The same among the twins. num_stations: twins included."""
    half = num_stations // 2
    return Route(kv=route.kv + half, weights=route.weights + half, priority=route.priority)
