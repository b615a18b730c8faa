"""A model's share on a KV rank that is not its home (split `tokens`): pages, and no weights.

It takes part in a step when any of its rows has slots here; then a graph for each pass answers the home layer by layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.attention import AttentionScratch
from crosspool.backends.cuda.attention_variants import num_splits
from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.exchange import TokenShare
from crosspool.backends.cuda.lane import LaneIdle, WorkerLane
from crosspool.backends.cuda.lane_memory import LaneMemory
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.own_pages import OwnRows, ranks_of
from crosspool.backends.cuda.passes import passes
from crosspool.backends.cuda.transport import begin_pass, end_pass
from crosspool.backends.numpy.page_reader import PageReader
from crosspool.backends.numpy.sequences import Sequence, row_slots
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor

IntArray = npt.NDArray[np.int64]


@dataclass
class KVShare:
    """What the rank keeps of the model. `number`: of this KV rank among all."""

    spec: ModelSpec
    geometry: PageGeometry
    frames: torch.Tensor
    max_pages: int
    number: int
    pages: PageReader
    rows: dict[tuple[int, int], OwnRows] = field(default_factory=dict)  # by lane and bucket


class ShareRows:
    """A step's rows as a share sees them: positions and block tables, no tokens."""

    def __init__(self, step: StepDescriptor, sequences: Mapping[int, Sequence], page_tokens: int) -> None:
        """Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages."""
        self._step = step
        self._sequences: list[Sequence] = []
        self.tables: list[IntArray] = []
        positions: list[int] = []
        rows: list[int] = []
        for idx, row in enumerate(step.rows):
            sequence = sequences.get(row.sequence_id)
            if sequence is None:
                raise ValueError(f"sequence {row.sequence_id} is not known here; send it in the step's `joining`")
            table = sequence.block_table(row)
            row_slots(row, table, len(positions), page_tokens)  # raises, naming what is missing
            self._sequences.append(sequence)
            self.tables.append(table)
            positions += range(row.num_cached_tokens, row.num_cached_tokens + row.num_new_tokens)
            rows += [idx] * row.num_new_tokens
        self.positions: IntArray = np.array(positions, dtype=np.int64)
        self.row_of_token: IntArray = np.array(rows, dtype=np.int64)

    def ranks(self, page_tokens: int) -> set[int]:
        """The numbers of the KV ranks that hold slots of any row."""
        return step_ranks(self._step, self.tables, page_tokens)

    def commit(self) -> None:
        for sequence, row, table in zip(self._sequences, self._step.rows, self.tables, strict=True):
            sequence.commit(row, table, None)


def step_ranks(step: StepDescriptor, tables: list[IntArray], page_tokens: int) -> set[int]:
    """The numbers of the KV ranks that hold slots of any row of the step."""
    found: set[int] = set()
    for row, table in zip(step.rows, tables, strict=True):
        found |= ranks_of(table, row.num_cached_tokens + row.num_new_tokens, page_tokens)
    return found


class SharePass:
    """The kernels of a pass of `rows.slots` rows."""

    def __init__(
        self, kernels: Launcher, lane: LaneMemory, share: KVShare, rows: OwnRows, bucket: int, link: DeviceInlet
    ) -> None:
        self.rows = rows
        self._kernels, self._lane, self._spec = kernels, lane, share.spec
        cache = PagedCache(frames=share.frames, frame_table=rows.tables.tables, geometry=share.geometry)
        self._side = TokenShare(kernels, lane, rows, cache, link.link.map(), bucket)
        specs = {layer.attention for layer in share.spec.layers}
        self._splits = {attention: num_splits(attention, bucket, kernels.num_sms) for attention in specs}
        self._scratch = AttentionScratch.for_specs(specs, bucket, kernels.num_sms, share.frames.device)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        begin_pass(self._kernels, self._lane)
        for layer, each in enumerate(self._spec.layers):
            yield layer
            self._side.answer(each.attention, layer, self._scratch, self._splits[each.attention])
        end_pass(self._kernels, self._lane, self._spec.num_layers)


def answers(
    kernels: Launcher, share: KVShare, step: StepDescriptor, rows: ShareRows, lane: WorkerLane, inlet: DeviceInlet
) -> HalfStep[None]:
    """Run the share's passes of a step; its block tables are remembered after the last."""
    header, num_layers = step.header, share.spec.num_layers
    plan = passes(header.num_tokens, header.step_seq, num_layers)
    yield Wait((LaneIdle(lane.memory), inlet), OPEN_EPOCH)
    last_epoch = plan[-1].base + num_layers
    has_ended = False
    try:
        for part in plan:

            def make(bucket: int = part.bucket) -> SharePass:
                own = share.rows.get((header.lane, bucket))
                if own is None:
                    own = OwnRows(share.geometry, bucket, share.max_pages, share.number, share.frames.device)
                    share.rows[header.lane, bucket] = own
                return SharePass(kernels, lane.memory, share, own, bucket, inlet)

            key = ("share", part.bucket)
            source = lane.find_pass(header.model, (inlet.link,), key, make)
            assert isinstance(source, SharePass)
            tokens = np.arange(part.start, part.start + part.bucket)
            tokens[part.num_tokens :] = part.start  # rows that are not in use repeat the first
            tables = [rows.tables[row] for row in rows.row_of_token[tokens].tolist()]
            with torch.cuda.stream(lane.stream):
                source.rows.set(tables, rows.positions[tokens])
            lane.memory.push(part.base, num_layers)
            if lane.stream is not None:
                yield from lane.run_pass(header.model, (inlet.link,), key, (inlet,), part.base)
            else:
                for layer in source.kernels():
                    yield Wait((inlet,), part.base + layer + 1)
        yield Wait((inlet,), last_epoch)
        has_ended = True
    finally:
        if not has_ended:
            lane.give_up(last_epoch)
    rows.commit()
