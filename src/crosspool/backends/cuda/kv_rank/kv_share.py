"""A model's share on a KV rank that is not its home: a graph for each pass answers the home layer by layer.

Under `tokens` it has pages and no weights, and takes part in a step when any of its rows has slots here. Under `heads`
it has its heads of every layer, and takes part always.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from crosspool.backends.base import HalfStep, IntArray, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, DeviceInlet
from crosspool.backends.cuda.channels.transport import begin_pass, end_pass
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.kernels.attention import AttentionScratch
from crosspool.backends.cuda.kernels.attention_variants import num_splits
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_frames.own_pages import OwnRows, ranks_of
from crosspool.backends.cuda.kv_rank.exchange import TokenShare
from crosspool.backends.cuda.kv_rank.head_exchange import HeadShare
from crosspool.backends.cuda.kv_rank.kv_pass import KVRows
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.backends.cuda.steps.passes import passes
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.backends.sequences.row_slots import row_slots
from crosspool.backends.sequences.sequence import Sequence, sequence_of
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor


@dataclass
class KVShare:
    """What the rank keeps of the model. number: this KV rank's among all. weights: of its heads, if they are cut."""

    spec: ModelSpec
    geometry: PageGeometry
    frames: torch.Tensor
    max_pages: int
    number: int
    pages: PageReader
    weights: AttentionWeights | None = None
    num_bytes: int = 0
    rows: dict[tuple[int, int], OwnRows | KVRows] = field(default_factory=dict)  # by lane and bucket

    def takes_part(self, rows: "ShareRows") -> bool:
        """Whether the home waits for this rank in a step."""
        return self.weights is not None or self.number in rows.ranks(self.geometry.page_tokens)


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
            sequence = sequence_of(row, sequences)
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


class TokenSharePass:
    """The kernels of a pass of `bucket` rows that attends to the pages here."""

    def __init__(
        self, kernels: Launcher, lane: LaneMemory, share: KVShare, rows: OwnRows, bucket: int, link: DeviceInlet
    ) -> None:
        self.rows = rows
        self._kernels, self._lane, self._spec = kernels, lane, share.spec
        cache = PagedCache(frames=share.frames, frame_table=rows.tables.tables, geometry=share.geometry)
        self._side = TokenShare(kernels, lane, rows, cache, link.link.map(), bucket)
        specs = {layer.attention for layer in share.spec.layers}
        self._splits = {attention: num_splits(attention, kernels.num_sms) for attention in specs}
        self._scratch = AttentionScratch.for_specs(specs, bucket, kernels.num_sms, share.frames.device)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        begin_pass(self._kernels, self._lane)
        for layer, each in enumerate(self._spec.layers):
            yield layer
            self._side.answer(each.attention, layer, self._scratch, self._splits[each.attention])
        end_pass(self._kernels, self._lane, self._spec.num_layers)


class HeadSharePass:
    """The kernels of a pass of `bucket` rows over the heads here."""

    def __init__(
        self, kernels: Launcher, lane: LaneMemory, share: KVShare, rows: KVRows, bucket: int, link: DeviceInlet
    ) -> None:
        self.rows = rows
        self._kernels, self._lane, self._half, self._spec = kernels, lane, rows.half, share.spec
        hidden, device = share.spec.hidden_size, share.frames.device
        self._side = HeadShare(kernels, lane, link.link.map(), bucket, hidden, device)

    def kernels(self) -> Iterator[int]:
        """Enqueue every kernel; yields each layer before its wait."""
        half = self._half
        half.one_row_per_sequence, half.home = False, None
        begin_pass(self._kernels, self._lane, half.token_ids, half.positions, half.lengths)
        half.turn()
        for layer in range(self._spec.num_layers):
            yield layer
            self._side.take(layer, half.normed)
            half.residual.zero_()
            half.attend_only(layer)
            self._side.put(layer, half.residual)
        end_pass(self._kernels, self._lane, self._spec.num_layers)


def _make_rows(kernels: Launcher, share: KVShare, bucket: int) -> OwnRows | KVRows:
    if share.weights is None:
        return OwnRows(share.geometry, bucket, share.max_pages, share.number, share.frames.device)
    return KVRows(kernels, share.spec, share.weights, share.frames, share.geometry, bucket, share.max_pages)


def answers(
    kernels: Launcher, share: KVShare, step: StepDescriptor, rows: ShareRows, lane: WorkerLane, inlet: DeviceInlet
) -> HalfStep[None]:
    """Run the share's passes of a step; its block tables are remembered after the last."""
    header, num_layers = step.header, share.spec.num_layers
    plan = passes(header.num_tokens, header.step_seq, num_layers)
    yield Wait((lane.idle, inlet), OPEN_EPOCH)
    last_epoch = plan[-1].base + num_layers
    with StepOnDevice(lane, last_epoch):
        for part in plan:

            def make(bucket: int = part.bucket) -> TokenSharePass | HeadSharePass:
                own = share.rows.get((header.lane, bucket))
                if own is None:
                    own = share.rows[header.lane, bucket] = _make_rows(kernels, share, bucket)
                if isinstance(own, KVRows):
                    return HeadSharePass(kernels, lane.memory, share, own, bucket, inlet)
                return TokenSharePass(kernels, lane.memory, share, own, bucket, inlet)

            key = ("share", part.bucket)
            source = lane.find_pass(header.model, (inlet.link,), key, make)
            assert isinstance(source, TokenSharePass | HeadSharePass)
            tokens = np.arange(part.start, part.start + part.bucket)
            tokens[part.num_tokens :] = part.start  # rows that are not in use repeat the first
            tables = [rows.tables[row] for row in rows.row_of_token[tokens].tolist()]
            positions = rows.positions[tokens]
            with on_stream(lane.stream):
                source.rows.set(tables, positions)
            ids = [0] * part.bucket  # the home's: a share needs none
            lane.memory.push(part.base, num_layers, part.bucket, ids, positions.tolist())
            if lane.stream is not None:
                yield from lane.run_pass(header.model, (inlet.link,), key, (inlet,), part.base)
            else:
                for layer in source.kernels():
                    yield Wait((inlet,), part.base + layer + 1)
        yield Wait((inlet,), last_epoch)
    rows.commit()
