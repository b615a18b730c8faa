"""One model over several KV ranks in one thread: real workers, channels that are plain arrays, seeded interleavings."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from crosspool.backends.base import LaneLinks
from crosspool.backends.numpy.ffn_worker import NumpyFFNWorker
from crosspool.backends.numpy.kv_worker import NumpyAttentionWorker
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.kv_pool.split import KVSplit, cached_spec, exchange_width
from crosspool.models.directory import ModelDirectory
from crosspool.scheduler.step import StepDescriptor
from tests.support.direct_lanes import DirectChannel, ignore_progress
from tests.support.half_turns import one_at_random, take_turns

PAGE_TOKENS = 8
FRAME_BYTES = 32 * 1024
NUM_FRAMES = 200


def split_placement(directory: ModelDirectory, split: KVSplit, num_kv: int, weights_ranks, home: int = 0, **changes):
    """The model over `num_kv` KV ranks; those after the home follow in the order of their numbers."""
    ranks = [f"kv{(home + idx) % num_kv}" for idx in range(num_kv)]
    fields = dict(
        name=directory.spec.family,
        directory=directory.path,
        hidden_size=directory.spec.hidden_size,
        kv_rank=ranks[0],
        kv_peers=tuple(ranks[1:]),
        kv_split=split,
        exchange_width=exchange_width(directory.spec, split),
        weights_ranks=tuple(weights_ranks),
        page_tokens=PAGE_TOKENS,
        frame_bytes=FRAME_BYTES,
    )
    return ModelPlacement(**(fields | changes))


def geometry_of(placement: ModelPlacement, directory: ModelDirectory) -> PageGeometry:
    spec = cached_spec(directory.spec, placement.kv_split, len(placement.kv_ranks))
    return page_geometry(spec, page_tokens=placement.page_tokens, frame_bytes=placement.frame_bytes, kv_dtype="float32")


class SplitPaging:
    """Hands out pages of a split model. `choose` draws the number of a page's rank, under `tokens`."""

    def __init__(
        self, placement: ModelPlacement, geometry: PageGeometry, num_frames: int, choose: Callable[[int], int]
    ) -> None:
        self._numbers = [int(rank.removeprefix("kv")) for rank in placement.kv_ranks]
        self._split = placement.kv_split
        self._width = geometry.frames_per_page
        self._free = {
            number: list(range(number * num_frames + 1, (number + 1) * num_frames)) for number in self._numbers
        }
        self._choose = choose
        self.num_pages = dict.fromkeys(self._numbers, 0)

    def page(self, idx: int) -> tuple[int, ...]:
        """A page for page `idx` of a sequence."""
        numbers = self._numbers if self._split == "heads" else [self._numbers[self._choose(idx) % len(self._numbers)]]
        for number in numbers:
            self.num_pages[number] += 1
        return tuple(self._free[number].pop() for number in numbers for _ in range(self._width))


def repaged(steps: Iterator[StepDescriptor], paging: SplitPaging, home: str) -> Iterator[StepDescriptor]:
    """The same steps led by `home`, with other pages."""
    for step in steps:
        rows = tuple(
            row._replace(new_pages=tuple(paging.page(row.first_new_page + idx) for idx in range(len(row.new_pages))))
            for row in step.rows
        )
        yield replace(step, rows=rows, header=step.header._replace(kv_rank=home))


class SplitKVModel:
    """One model on several KV ranks and `num_weights` weights ranks."""

    def __init__(
        self, directory: ModelDirectory, split: KVSplit, num_kv: int, num_weights: int = 1, home: int = 0
    ) -> None:
        kv_ranks = tuple(f"kv{idx}" for idx in range(num_kv))
        weights_ranks = tuple(f"w{idx}" for idx in range(num_weights))
        self.placement = split_placement(directory, split, num_kv, weights_ranks, home)
        self.geometry = geometry_of(self.placement, directory)
        self.kv = {rank: NumpyAttentionWorker(NUM_FRAMES, FRAME_BYTES, rank, kv_ranks) for rank in kv_ranks}
        self.ffn = {rank: NumpyFFNWorker(rank) for rank in weights_ranks}
        for worker in (*self.kv.values(), *self.ffn.values()):
            worker.add_model(self.placement, ignore_progress)
        names = (*kv_ranks, *weights_ranks)
        self.channels = {(one, two): DirectChannel() for one in names for two in names if one != two}

    def halves(self, step: StepDescriptor):
        """Every rank's half of the step, by rank."""
        home, shares = self.placement.kv_rank, self.placement.shares(self.placement.kv_rank)
        halves = {home: self.kv[home].run(step, self._links(home, self.placement.weights_ranks, shares))}
        for rank in shares:
            share = self.kv[rank].run_share(step, self._links(rank, (), (home,)))
            if share is not None:
                halves[rank] = share
        for rank, worker in self.ffn.items():
            halves[rank] = worker.run(step.header, self._links(rank, (home,)))
        return halves

    def run(
        self,
        step: StepDescriptor,
        rng: np.random.Generator,
        max_segments: int | None = None,
        *,
        is_lagging: bool = False,
    ) -> tuple[SampledToken, ...] | None:
        """Run one step; with `max_segments`, give up after as many segments and return None unless it has ended.

        is_lagging: shares run only when nobody else can, and what they have not begun when the home ends is dropped.
        """
        home, shares = self.placement.kv_rank, self.placement.shares(self.placement.kv_rank)
        halves, at_random = self.halves(step), one_at_random(rng)

        def lagging(ready: list[str]) -> list[str]:
            if home not in halves and set(halves) <= set(shares):
                return []
            return at_random([rank for rank in ready if rank not in shares] or ready)

        return take_turns(halves, home, pick=lagging if is_lagging else at_random, max_segments=max_segments)[0]

    def _links(self, rank, peers, exchange=()) -> LaneLinks:
        return LaneLinks(
            outlets={peer: self.channels[rank, peer] for peer in peers},
            inlets={peer: self.channels[peer, rank] for peer in peers},
            exchange_outlets={peer: self.channels[rank, peer] for peer in exchange},
            exchange_inlets={peer: self.channels[peer, rank] for peer in exchange},
        )
