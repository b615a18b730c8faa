"""Both pools of one lane in one thread: the real workers, channels that are plain arrays, interleavings from a seed."""

import numpy as np

from crosspool.backends.base import LaneLinks
from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker
from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.models.directory import ModelDirectory
from crosspool.pools_config import Route
from crosspool.scheduler.step import StepDescriptor
from tests.support.half_turns import one_at_random, take_turns


class DirectChannel:
    """Inlet and outlet at once: two slots by layer parity, filled with NaN before each use, and one flag."""

    def __init__(self) -> None:
        self._slots = [np.empty((0, 0), np.float32)] * 2
        self._flag = 0

    def put(self, layer: int, epoch: int, payload: np.ndarray) -> None:
        assert payload.dtype == np.float32
        assert epoch > self._flag
        self._slots[layer % 2] = payload.copy()
        self._flag = epoch

    def arrived(self, epoch: int) -> bool:
        return self._flag >= epoch

    def take(self, layer: int, num_tokens: int, width: int) -> np.ndarray:
        rows = self._slots[layer % 2]
        assert rows.shape == (num_tokens, width)
        rows.flags.writeable = False
        return rows


def ignore_progress(loaded_bytes: int, total_bytes: int) -> None:
    pass


class SplitModel:
    """One model on one KV rank and `num_weights` weights ranks."""

    def __init__(
        self,
        directory: ModelDirectory,
        num_weights: int = 1,
        *,
        page_tokens: int,
        num_frames: int,
        frame_bytes: int,
        route: Route = "ffn",
    ) -> None:
        ranks = tuple(f"w{idx}" for idx in range(num_weights))
        placement = ModelPlacement(
            name=directory.spec.family,
            directory=directory.path,
            hidden_size=directory.spec.hidden_size,
            kv_rank="kv0",
            weights_ranks=ranks,
            page_tokens=page_tokens,
            frame_bytes=frame_bytes,
            route=route,
        )
        self.attention = NumpyAttentionWorker(num_frames, frame_bytes)
        self.attention.add_model(placement, ignore_progress)
        self.ffn = {rank: NumpyFFNWorker(rank) for rank in ranks}
        for worker in self.ffn.values():
            worker.add_model(placement, ignore_progress)
        self.a2f = {rank: DirectChannel() for rank in ranks}
        self.f2a = {rank: DirectChannel() for rank in ranks}
        self.told: list[tuple[SampledToken, ...]] = []  # of the last step, if it was a run: tokens of all but its last

    def run(
        self, step: StepDescriptor, rng: np.random.Generator | None = None, max_segments: int | None = None
    ) -> tuple[SampledToken, ...] | None:
        """Run one step; with `max_segments`, give up after as many segments and return None unless it has ended."""
        rng = rng or np.random.default_rng(0)
        links = LaneLinks(outlets=self.a2f, inlets=self.f2a)
        halves = {"kv0": self.attention.run(step, links)}
        for rank, worker in self.ffn.items():
            own = LaneLinks(outlets={"kv0": self.f2a[rank]}, inlets={"kv0": self.a2f[rank]})
            halves[rank] = worker.run(step.header, own)
        result, self.told = take_turns(halves, "kv0", pick=one_at_random(rng), max_segments=max_segments)
        return result
