"""What a step leaves on the device for its end, and how it becomes tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.steps.batch import Batch, SampledRow
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.passes import Pass
from crosspool.backends.sequences.sampler import sample
from crosspool.core import SampledToken


class Outcome:
    """What a step leaves on the device for its end: tokens, and logits where the host samples.

    Arrived once the logits are on the host.
    """

    def __init__(self, batch: Batch, lane: WorkerLane) -> None:
        self._batch, self._lane = batch, lane
        self._drawn: list[tuple[Callable[[], list[int]], list[tuple[SampledRow, int]]]] = []
        self._logits: list[tuple[list[SampledRow], torch.Tensor]] = []
        self._copied: Any = None

    def expect(self, part: Pass, slot: int, sampled: list[SampledRow], logits: torch.Tensor) -> None:
        """Note the rows that a pass samples; on a GPU their logits' copy is enqueued behind the pass."""
        places = [(row, row.token - part.start) for row in sampled]
        tokens = partial(self._lane.memory.tokens, slot, part.bucket)
        if not self._batch.hosted:
            self._drawn.append((tokens, places))
            return
        with on_stream(self._lane.stream):
            self._note(places, tokens, logits)

    def expect_tokens(self, sampled: Sequence[SampledRow], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """The same of a chunk: tokens (rows) int32, on the host once it has ended, and logits (rows, vocabulary).

        Copies are enqueued on torch's current stream.
        """
        self._note([(row, index) for index, row in enumerate(sampled)], tokens.tolist, logits)

    def _note(
        self, places: list[tuple[SampledRow, int]], tokens: Callable[[], list[int]], logits: torch.Tensor
    ) -> None:
        """places: each row, and its index among the tokens and the logits."""
        hosted = [(row, at) for row, at in places if row.row in self._batch.hosted]
        drawn = [(row, at) for row, at in places if row.row not in self._batch.hosted]
        if drawn:
            self._drawn.append((tokens, drawn))
        if not hosted:
            return
        on_host = pinned((len(hosted), logits.shape[1]), torch.float32, logits.device)
        for idx, (_row, at) in enumerate(hosted):
            on_host[idx].copy_(logits[at], non_blocking=True)
        if self._lane.stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._logits.append(([row for row, _ in hosted], on_host))

    def is_copying(self) -> bool:
        return self._copied is not None and not self._copied.query()

    def arrived(self, epoch: int) -> bool:
        return not self.is_copying()

    def finish(self) -> tuple[SampledToken, ...]:
        """Sample and commit: one token per row with `sample`, in row order."""
        found: dict[int, SampledToken] = {}
        for read, drawn in self._drawn:
            tokens = read()
            for row, at in drawn:
                found[row.row] = SampledToken(self._batch.rows[row.row].sequence_id, tokens[at])
        for hosted, logits in self._logits:
            rows = [self._batch.sampling_row(row) for row in hosted]
            for row, token in zip(hosted, sample(logits.numpy(), rows), strict=True):
                found[row.row] = token
        self._batch.commit(found)
        return tuple([found[row.row] for row in self._batch.sampled])
