"""served_model: a Hugging Face directory as a ServedModel, with the page geometry that fits it."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from crosspool.engine.served_model import ServedModel
from crosspool.errors import CheckpointError
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.kv_pool.split import cached_spec, choose_kv_split
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import DType
from crosspool.pools_config import KVSplitChoice


def served_model(
    directory: Path | str,
    *,
    weights_ranks: Sequence[str],
    frame_bytes: int,
    name: str | None = None,
    kv_ranks: Sequence[str] = ("kv0",),
    kv_split: KVSplitChoice = "auto",
    page_tokens: int | None = None,
    max_context: int | None = None,
    kv_dtype: DType = "float32",
    weights_shares: Sequence[float] = (),
    prefill_ranks: Sequence[str] = (),
) -> ServedModel:
    """Read a directory's JSON files; no weights are touched. kv_dtype: what the backend's cache holds.

    kv_ranks: those that hold the model's KV, its home first. Raises UnsupportedModelError, CheckpointError, and
    ValueError where no page fits a frame or the model cannot be split as asked.
    """
    model_dir = read_model_dir(directory)
    served_name = name or model_dir.served_name
    split = choose_kv_split(model_dir.spec, len(kv_ranks), kv_split, served_name)
    spec = cached_spec(model_dir.spec, split, len(kv_ranks))
    tokens = page_tokens or choose_page_tokens(spec, frame_bytes, kv_dtype)
    geometry = page_geometry(spec, page_tokens=tokens, frame_bytes=frame_bytes, kv_dtype=kv_dtype, model=served_name)
    return ServedModel(
        name=served_name,
        spec=model_dir.spec,
        directory=model_dir.path,
        weights_ranks=tuple(weights_ranks),
        weights_shares=tuple(weights_shares),
        prefill_ranks=tuple(prefill_ranks),
        page_tokens=tokens,
        frames_per_page=geometry.frames_per_page,
        frame_bytes=frame_bytes,
        kv_rank=kv_ranks[0],
        kv_peers=tuple(kv_ranks[1:]),
        kv_split=split,
        kv_dtype=kv_dtype,
        max_context=max_context,
        tokenizer=_tokenizer(model_dir.path) if "tokenizer.json" in model_dir.tokenizer_files else None,
    )


def _tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer this version of tokenizers reads: {error}") from error
