"""Checkpoint: the safetensors files of one model directory, found, checked and read by region.

Opening reads headers only. Every file's length is compared with its header, and the index with the files, so that an
interrupted download is refused before a single weight is read.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from crosspool.errors import CheckpointError
from crosspool.models.config_json import read_json
from crosspool.units import format_bytes

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

STORED_DTYPES: Mapping[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""Dtypes a weight may be stored in, by their safetensors names."""

ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes before its first element


class Checkpoint:
    """Open safetensors files. A context manager: files are mapped on first use and closed at its end."""

    def __init__(self, directory: Path) -> None:
        """Read every header. Raises CheckpointError for missing, cut-short or contradicting files."""
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = _stored_tensors(directory)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def read(self, name: str, region: tuple[slice, ...]) -> npt.NDArray[Any]:
        """A copy of one region of a tensor, in the dtype it is stored in. Strides in `region` are one."""
        stored = self.tensors[name]
        if stored.file not in self._open:
            self._open[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="numpy"))
        array: npt.NDArray[Any] = self._open[stored.file].get_slice(name)[region]
        return array

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    if (directory / SINGLE_NAME).exists():
        _log_leftovers(directory, {SINGLE_NAME})
        return read_header(directory / SINGLE_NAME)
    index = directory / INDEX_NAME
    if not index.exists():
        found = sorted(path.name for path in directory.glob("*.safetensors"))
        hint = (
            f"; it holds {', '.join(found)} but no index" if found else "; PyTorch .bin files must be converted first"
        )
        raise CheckpointError(f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME} (incomplete download?){hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    return _indexed_tensors(index, weight_map)


def _indexed_tensors(index: Path, weight_map: dict[str, Any]) -> dict[str, StoredTensor]:
    directory = index.parent
    odd = [name for name in weight_map.values() if not isinstance(name, str)]
    odd += [name for name in set(weight_map.values()) if Path(name).name != name] if not odd else []
    if odd:
        raise CheckpointError(f"{index}: names {odd[0]!r}, which is not a file of its directory")
    files = sorted(set(weight_map.values()))
    if missing := [name for name in files if not (directory / name).exists()]:
        lost = [tensor for tensor, file in weight_map.items() if file in missing]
        raise CheckpointError(
            f"{directory}: {', '.join(missing)} missing, with {len(lost)} tensors, {lost[0]} among them "
            "(incomplete download?)"
        )
    _log_leftovers(directory, set(files))
    by_file = {name: read_header(directory / name) for name in files}
    tensors: dict[str, StoredTensor] = {}
    for tensor, file in weight_map.items():
        if tensor not in by_file[file]:
            raise CheckpointError(f"{directory / file}: lacks {tensor}, which the index places there (wrong file?)")
        tensors[tensor] = by_file[file][tensor]
    # What the files hold beyond the index is checked like everything else: used if needed, refused if unknown.
    for stored in by_file.values():
        for tensor, entry in stored.items():
            tensors.setdefault(tensor, entry)
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises CheckpointError if it is cut short or not such a file."""
    if not file.is_file():
        raise CheckpointError(f"{file}: not a regular file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"{file}: {size} bytes are too few for a safetensors file (incomplete download, or a Git LFS pointer?)"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors: dict[str, StoredTensor] = {}
        spans: dict[str, int] = {}
        last = 0
        for name, entry in entries.items():
            begin, end = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            tensors[name] = StoredTensor(file, str(entry["dtype"]), shape, 8 + length + begin)
            spans[name], last = end - begin, max(last, end)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file}: its safetensors header is damaged ({error!r})") from error
    promised = 8 + length + last
    if promised != size:
        verdict = "missing: incomplete download?" if promised > size else "too many"
        raise CheckpointError(
            f"{file}: its header promises {promised} bytes, the file has {size} "
            f"({format_bytes(abs(promised - size))} {verdict})"
        )
    for name, tensor in tensors.items():
        _check_span(name, tensor, spans[name])
    return tensors


def _check_span(name: str, tensor: StoredTensor, span: int) -> None:
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    if item_bytes is not None and prod(tensor.shape) * item_bytes != span:
        raise CheckpointError(
            f"{tensor.file}: {name} of shape {list(tensor.shape)} in {tensor.dtype} cannot take {span} bytes"
        )


def _log_leftovers(directory: Path, used: set[str]) -> None:
    if leftovers := sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used):
        logger.info("%s: %s ignored: not part of the checkpoint", directory, ", ".join(leftovers))
