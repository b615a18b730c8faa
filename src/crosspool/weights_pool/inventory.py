"""Inventory: every tensor the spec asks for, found in the checkpoint and checked; every other one accounted for."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from crosspool.errors import CheckpointError
from crosspool.models.families.family import Family, Source
from crosspool.models.families.registry import FAMILIES
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import TensorSpec, model_tensors
from crosspool.weights_pool.checkpoint import STORED_DTYPES, Checkpoint

logger = logging.getLogger(__name__)

TIED_ROWS = 64
"""Rows of a stored head that are compared with the embedding's, evenly over the vocabulary."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Frequencies that old exports stored; they follow from the config."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Where each canonical tensor lies."""

    sources: Mapping[TensorSpec, tuple[Source, ...]]


def take_inventory(checkpoint: Checkpoint, spec: ModelSpec) -> Inventory:
    """Find and check all tensors of both pools.

    Raises CheckpointError for a tensor that is missing, of the wrong shape or dtype, or that nothing here knows.
    """
    family = FAMILIES[spec.family]
    stored = checkpoint.tensors
    sources = {tensor: tuple(family.sources(tensor, stored)) for tensor in model_tensors(spec)}
    needed = {source.name for parts in sources.values() for source in parts}
    if missing := sorted(needed - stored.keys()):
        raise CheckpointError(
            f"{checkpoint.directory}: {len(missing)} of {len(needed)} tensors missing, "
            f"{missing[0]} among them ({_why_missing(missing[0], stored)})"
        )
    for parts in sources.values():
        for source in parts:
            _check(checkpoint, source)
    _account_for_rest(checkpoint, family, spec, stored.keys() - needed)
    return Inventory(sources)


def _why_missing(name: str, stored: Collection[str]) -> str:
    """A likely cause: the tensor under another prefix, as in files of a wrapper or of a model without its head."""
    for other in sorted(stored):
        if other.endswith(name.removeprefix("model.")):
            return f"there is {other}: a checkpoint of a larger model around this one, or of a part of it?"
    return "incomplete download, or a config of another model?"


def _check(checkpoint: Checkpoint, source: Source) -> None:
    found = checkpoint.tensors[source.name]
    if found.shape != source.shape:
        raise CheckpointError(
            f"{found.file}: {source.name} has shape {list(found.shape)}, config.json asks for {list(source.shape)}"
        )
    if found.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{found.file}: {source.name} is stored as {found.dtype}; supported: {', '.join(STORED_DTYPES)}"
        )


def _require_tied(checkpoint: Checkpoint, head: str, embed: str) -> None:
    """Raise CheckpointError where a stored head is another matrix than the embedding. Looks at some rows of both."""
    stored, tied = checkpoint.tensors[head], checkpoint.tensors[embed]
    same = (stored.shape, stored.dtype) == (tied.shape, tied.dtype)
    for row in range(0, stored.shape[0], max(1, stored.shape[0] // TIED_ROWS)) if same else ():
        region = (slice(row, row + 1), slice(None))
        same = same and np.array_equal(checkpoint.read(head, region), checkpoint.read(embed, region))
    if not same:
        raise CheckpointError(
            f"{stored.file}: {head} is another matrix than {embed}, to which config.json ties it; "
            "set tie_word_embeddings to false there"
        )


def _account_for_rest(checkpoint: Checkpoint, family: Family, spec: ModelSpec, names: set[str]) -> None:
    """Skip by exact rules what is known to be of no use; anything else is an error."""
    layers: dict[int, int] = {}
    unknown = []
    for name in sorted(names):
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= spec.num_layers:
            layers[int(layer[1])] = layers.get(int(layer[1]), 0) + 1
        elif name == family.model_names["head"] and spec.tie_word_embeddings:
            _require_tied(checkpoint, name, family.model_names["embed"])
        elif not _ROTARY_BUFFER.fullmatch(name):
            unknown.append(name)
    if unknown:
        file = checkpoint.tensors[unknown[0]].file
        raise CheckpointError(
            f"{file}: {unknown[0]} is no tensor of a {spec.family} model with this config.json "
            f"({len(unknown)} such tensors); a wrong or changed config?"
        )
    if layers:
        logger.info(
            "%s: layers %s skipped (%d tensors): prediction layers after the last of num_hidden_layers %d",
            checkpoint.directory,
            ", ".join(map(str, sorted(layers))),
            sum(layers.values()),
            spec.num_layers,
        )
