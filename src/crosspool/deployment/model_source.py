"""Where a served model's files are: a directory here, a demo model's name, or a Hugging Face id, fetched once."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosspool.errors import CheckpointError
from crosspool.models.config_json import read_json
from crosspool.models.families.registry import spec_from_config

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""No pickles and no code: what CrossPool reads and nothing else."""

UNWANTED = ("*/*.safetensors", "consolidated*.safetensors")
"""The same weights once more in another form, as some repositories have them."""

DEMO_MODELS = {
    config.parent.name: config.parent
    for config in sorted((Path(__file__).parents[1] / "demo_models").glob("*/config.json"))
}
"""The models inside the package, by name."""


def is_hub_id(source: str) -> bool:
    """Whether `source` names a repository of the Hugging Face hub rather than a directory here."""
    return HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def named_source(source: str) -> tuple[str | None, str]:
    """The name and the place that a user gives as DIR, a Hugging Face id or NAME=DIR; None: no name is given."""
    name, found, path = source.partition("=")
    return (name, path) if found and not Path(source).exists() else (None, source)


def model_directory(source: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The directory of `source`; a Hugging Face id is downloaded first, with a progress bar, unless it is cached.

    Of a model that no family implements nothing but small files is: that raises UnsupportedModelError.

    A directory of a demo model's name goes before that model.

    Raises CheckpointError, in one line, where there is no such directory or repository, or no network.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{source} is a file; a model is a directory with config.json and its weights")
    if source in DEMO_MODELS:
        return DEMO_MODELS[source]
    if not is_hub_id(source):
        raise CheckpointError(f"{source}: no such directory, and not a Hugging Face id such as Qwen/Qwen3-30B-A3B")
    return _download(source, revision, download_dir)


def _download(repository: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import tqdm

    def fetched(wanted: Sequence[str], **options: Any) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(wanted),
                ignore_patterns=list(UNWANTED),
                **options,
            )
        )

    try:
        small = fetched(["*.json"], tqdm_class=_silent(tqdm))
        spec_from_config(read_json(small / "config.json"), f"{repository}: config.json")
        return fetched(WANTED)
    except GatedRepoError:
        raise CheckpointError(
            f"{repository} is gated on Hugging Face; accept its terms there and set HF_TOKEN, or give a directory"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {revision!r} on Hugging Face") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repository} is neither a directory here nor a repository on Hugging Face that HF_TOKEN may read"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        cause = str(error.__cause__ or error).split("\n", 1)[0][:80]
        raise CheckpointError(
            f"cannot fetch {repository} from Hugging Face and it is not in the cache ({cause}); "
            "check the network, or give a model directory"
        ) from None


def _silent(bar: type[Any]) -> type[Any]:
    """The progress bar's class, its bars never shown."""

    def start(self: Any, *args: Any, **options: Any) -> None:
        bar.__init__(self, *args, **{**options, "disable": True})

    return type("Silent", (bar,), {"__init__": start})
