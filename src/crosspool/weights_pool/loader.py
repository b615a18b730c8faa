"""Streaming a model's share from safetensors straight to where it lives, without torch.

`plan_load` decides what to read and checks the whole checkpoint, both pools, against the spec before anything is read.
`iter_pieces` reads piece by piece in the stored dtype: what a backend with its own buffers uses. The two `load_*`
functions fill NumPy arrays with it. Host memory beyond the destination is one piece.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import Progress
from crosspool.models.directory import ModelDirectory
from crosspool.models.families.family import Source
from crosspool.models.tensors import FLOAT32_TENSORS, Pool, TensorSpec
from crosspool.weights_pool.checkpoint import ITEM_BYTES, Checkpoint
from crosspool.weights_pool.inventory import Inventory, take_inventory
from crosspool.weights_pool.placement import IntermediateSlice, intermediate_slices
from crosspool.weights_pool.regions import Index, Region, destination_shape, intermediate_width, regions

logger = logging.getLogger(__name__)

PIECE_ELEMENTS = 32 * 1024 * 1024
"""Unsliced matrices larger than this are read by rows: 64 MiB in bfloat16."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one destination tensor: `destination[index] = array`, up to a cast.

    array: in the stored dtype (bfloat16 through ml_dtypes), canonical orientation, valid until the next piece; may be
    strided. Every element of a destination is covered by exactly one piece.
    """

    tensor: TensorSpec
    index: Index
    array: Array


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor as one rank holds it: its canonical identity and its shape there."""

    tensor: TensorSpec
    shape: tuple[int, ...]
    is_zero: bool = False  # not read: a bias that another slice adds


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One rank's share: what it holds, and where that is read."""

    destinations: tuple[Destination, ...]
    parts: Mapping[int, IntermediateSlice]  # full intermediate width to this rank's slice of it
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Read:
    """One region of a stored tensor, and where it goes. num_bytes: of it, in the stored dtype, in the destination."""

    destination: Destination
    source: str
    region: Region
    num_bytes: int

    @property
    def tensor(self) -> TensorSpec:
        return self.destination.tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """One rank's share of a model, by canonical name: the model's own tensors, and those of each layer."""

    model: dict[str, Array]
    layers: tuple[dict[str, Array], ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for tensors in (self.model, *self.layers) for array in tensors.values())


def load_attention_weights(
    directory: ModelDirectory,
    dtype: npt.DTypeLike = np.float32,
    progress: Progress | None = None,
    *,
    is_share: bool = False,
    also: Collection[str] = (),
) -> ModelWeights:
    """The KV pool's share: embedding, norms, attention, head, in `dtype`. On an error nothing is left allocated.

    is_share: of a KV rank that is not the model's home: attention alone, every head of it.
    also: names of tensors of the weights pool that come with it, whole.
    """
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, "kv", skip=_is_homes if is_share else None, also=also)
        return _fill(checkpoint, directory, plan, dtype, progress)


def load_ffn_weights(
    directory: ModelDirectory,
    slice_index: int,
    num_slices: int,
    dtype: npt.DTypeLike = np.float32,
    progress: Progress | None = None,
    shares: Sequence[float] | None = None,
) -> ModelWeights:
    """One weights rank's share: its slice of every FFN tensor in `dtype`, router tensors whole and in float32.

    Shapes: see `regions.py`. Raises ValueError if the model is too narrow for `num_slices`.
    """
    with Checkpoint(directory.path) as checkpoint:
        plan = plan_load(checkpoint, directory, "weights", slice_index, num_slices, shares)
        return _fill(checkpoint, directory, plan, dtype, progress)


def plan_load(
    checkpoint: Checkpoint,
    directory: ModelDirectory,
    pool: Pool,
    slice_index: int = 0,
    num_slices: int = 1,
    shares: Sequence[float] | None = None,
    skip: Callable[[TensorSpec], bool] | None = None,
    also: Collection[str] = (),
) -> LoadPlan:
    """Check the whole checkpoint against the spec and lay out one rank's share of it, without what `skip` names.

    also: names of the other pool's tensors that this rank holds too, whole.

    Raises CheckpointError naming file, tensor and sizes; ValueError for a slice that cannot be.
    """
    if not 0 <= slice_index < num_slices:
        raise ValueError(f"slice_index is {slice_index}; it must lie between 0 and num_slices {num_slices} - 1")
    inventory = take_inventory(checkpoint, directory.spec)
    parts: dict[int, IntermediateSlice] = {}
    destinations = []
    for tensor in inventory.sources:
        if (tensor.pool != pool and tensor.name not in also) or (skip is not None and skip(tensor)):
            continue
        width = intermediate_width(tensor)
        if width is not None and width not in parts:
            parts[width] = intermediate_slices(width, num_slices, shares)[slice_index]
        shape = destination_shape(tensor, None if width is None else parts[width])
        is_zero = tensor.name == "expert_down_bias" and slice_index > 0
        destinations.append(Destination(tensor, shape, is_zero))
    return LoadPlan(tuple(destinations), parts, inventory)


def iter_pieces(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[Piece]:
    """Read a share piece by piece, in execution order."""
    for read in reads(checkpoint, plan):
        region = read.region
        array = checkpoint.read(read.source, region.read)
        if region.pick:
            array = array[region.pick]
        if region.transpose:
            array = array.swapaxes(-1, -2)
        yield Piece(read.tensor, region.index, array if array.ndim == len(region.index) else array[np.newaxis])


def reads(checkpoint: Checkpoint, plan: LoadPlan, max_elements: int | None = None) -> Iterator[Read]:
    """Every read of a plan, in execution order; whole matrices by rows of at most `max_elements` (PIECE_ELEMENTS)."""
    for destination in plan.destinations:
        for source in sources_of(plan, destination):
            yield from reads_of(checkpoint, plan, destination, source, max_elements)


def sources_of(plan: LoadPlan, destination: Destination) -> tuple[Source, ...]:
    """What a destination is read from; nothing where it is zero."""
    return () if destination.is_zero else tuple(plan.inventory.sources[destination.tensor])


def reads_of(
    checkpoint: Checkpoint,
    plan: LoadPlan,
    destination: Destination,
    source: Source,
    max_elements: int | None = None,
) -> Iterator[Read]:
    """The reads of one stored tensor, as `reads` gives them."""
    width = intermediate_width(destination.tensor)
    part = None if width is None else plan.parts[width]
    element_bytes = ITEM_BYTES[checkpoint.tensors[source.name].dtype]
    for region in regions(source, part, max_elements or PIECE_ELEMENTS):
        yield Read(destination, source.name, region, element_bytes * _elements(destination.shape, region.index))


def payload_bytes(checkpoint: Checkpoint, plan: LoadPlan) -> int:
    """Bytes of all reads of a plan, in the stored dtypes, without making them. Each destination has one such dtype."""
    total = 0
    for destination in plan.destinations:
        if not destination.is_zero:
            stored = checkpoint.tensors[plan.inventory.sources[destination.tensor][0].name]
            total += prod(destination.shape) * ITEM_BYTES[stored.dtype]
    return total


def _elements(shape: tuple[int, ...], index: Index) -> int:
    elements = 1
    for extent, axis in zip(shape, index, strict=True):
        start, stop, _ = axis.indices(extent)
        elements *= stop - start
    return elements


def _fill(
    checkpoint: Checkpoint, directory: ModelDirectory, plan: LoadPlan, dtype: npt.DTypeLike, progress: Progress | None
) -> ModelWeights:
    weights = ModelWeights({}, tuple({} for _ in range(directory.spec.num_layers)))
    missing: dict[TensorSpec, int] = {}
    for destination in plan.destinations:
        tensor = destination.tensor
        array: Array = np.zeros(destination.shape, np.float32 if tensor.name in FLOAT32_TENSORS else dtype)
        _holder(weights, tensor)[tensor.name] = array
        missing[tensor] = 0 if destination.is_zero else array.size
    written: set[tuple[TensorSpec, tuple[int | None, ...]]] = set()
    loaded, total = 0, sum(read.num_bytes for read in reads(checkpoint, plan))
    for piece in iter_pieces(checkpoint, plan):
        target = _holder(weights, piece.tensor)[piece.tensor.name][piece.index]
        corner = (piece.tensor, tuple(axis.start for axis in piece.index))
        assert target.shape == piece.array.shape, piece.tensor
        assert corner not in written, piece.tensor
        target[...] = piece.array
        written.add(corner)
        missing[piece.tensor] -= piece.array.size
        loaded += piece.array.nbytes
        if progress is not None:
            progress(loaded, total)
    assert not any(missing.values()), "every parameter is written exactly once"
    logger.debug("%s: %d tensors, %d bytes read", directory.path, len(missing), loaded)
    return weights


def _is_homes(tensor: TensorSpec) -> bool:
    """Whether only the home of a model has the tensor: what is not attention."""
    return tensor.layer is None or tensor.name in ("input_norm", "post_attention_norm")


def _holder(weights: ModelWeights, tensor: TensorSpec) -> dict[str, Array]:
    return weights.model if tensor.layer is None else weights.layers[tensor.layer]
