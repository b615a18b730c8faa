"""What a step leaves on the device for its end, and how it becomes tokens."""

from typing import Any

import torch

from crosspool.backends.cuda.batch import Batch, SampledRow
from crosspool.backends.cuda.lane import WorkerLane
from crosspool.backends.cuda.lane_memory import pinned
from crosspool.backends.cuda.passes import Pass
from crosspool.backends.cuda.sampling import needs_host
from crosspool.backends.numpy.sampler import sample
from crosspool.core import SampledToken


class Outcome:
    """What a step leaves on the device for its end: tokens, and logits where the host samples.

    It is also an inlet: arrived once the logits are on the host.
    """

    def __init__(self, batch: Batch, lane: WorkerLane) -> None:
        self._batch, self._lane = batch, lane
        self._drawn: list[tuple[Pass, int, list[SampledRow]]] = []
        self._logits: list[tuple[list[SampledRow], torch.Tensor]] = []
        self._copied: Any = None

    def expect(self, part: Pass, slot: int, sampled: list[SampledRow], logits: torch.Tensor) -> None:
        """Note the rows that a pass samples; on a GPU their logits' copy is enqueued behind the pass."""
        hosted = [row for row in sampled if needs_host(self._batch.sampling_row(row))]
        drawn = [row for row in sampled if row not in hosted]
        if drawn:
            self._drawn.append((part, slot, drawn))
        if not hosted:
            return
        on_host = pinned((len(hosted), logits.shape[1]), torch.float32, logits.device)
        with torch.cuda.stream(self._lane.stream):
            for idx, row in enumerate(hosted):
                on_host[idx].copy_(logits[row.token - part.start], non_blocking=True)
            if self._lane.stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record()
        self._logits.append((hosted, on_host))

    def is_copying(self) -> bool:
        return self._copied is not None and not self._copied.query()

    def arrived(self, epoch: int) -> bool:
        return not self.is_copying()

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")

    def finish(self) -> tuple[SampledToken, ...]:
        """Sample and commit: one token per row with `sample`, in row order."""
        found: dict[int, SampledToken] = {}
        for part, slot, drawn in self._drawn:
            tokens = self._lane.memory.tokens(slot, part.bucket)
            for row in drawn:
                sequence_id = self._batch.rows[row.row].sequence_id
                found[row.row] = SampledToken(sequence_id, tokens[row.token - part.start])
        for hosted, logits in self._logits:
            rows = [self._batch.sampling_row(row) for row in hosted]
            for row, token in zip(hosted, sample(logits.numpy(), rows), strict=True):
                found[row.row] = token
        self._batch.commit(found)
        return tuple(found[row.row] for row in self._batch.sampled)
