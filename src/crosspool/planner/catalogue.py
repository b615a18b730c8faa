"""The shipped catalogue: published models by name, so that a plan needs no download. Data: catalogue.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from crosspool.deployment.model_source import is_hub_id
from crosspool.errors import UnsupportedModelError
from crosspool.models.config_json import read_json
from crosspool.models.directory import read_model_dir
from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import (
    DenseFFNSpec,
    GQASpec,
    LayerSpec,
    ModelSpec,
    MoEFFNSpec,
    RopeSpec,
    RouterSpec,
    SharedExpertSpec,
)
from crosspool.planner.facts import FFNSpec, ModelFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueName:
    """What a name stands for: an entry, and whether it has that very shape or only stands in for it."""

    entry: str
    is_exact: bool


@cache
def _data() -> dict[str, Any]:
    text = (files("crosspool.planner") / "catalogue.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def entries() -> tuple[str, ...]:
    """Names of all entries, in the catalogue's order."""
    return tuple(_data()["models"])


@cache
def _names() -> Mapping[str, CatalogueName]:
    names = {}
    for entry, model in _data()["models"].items():
        for name in (entry, model["id"], model["id"].rsplit("/", 1)[-1]):
            names[name.lower()] = CatalogueName(entry=entry, is_exact=True)
    for name, alias in _data()["aliases"].items():
        entry = alias.get("same") or alias["nearest"]
        names[name.lower()] = CatalogueName(entry=entry, is_exact="same" in alias)
    return names


def lookup(name: str) -> CatalogueName | None:
    """The entry that a catalogue name, Hugging Face id or known other name stands for; None if there is none."""
    return _names().get(name.lower())


def hub_id(name: str) -> str | None:
    """The Hugging Face id of the entry that `name` stands for exactly; None otherwise."""
    found = lookup(name)
    return str(_data()["models"][found.entry]["id"]) if found is not None and found.is_exact else None


def catalogue_facts(name: str, served_name: str | None = None) -> ModelFacts:
    """Facts of a catalogue entry, under `served_name`. Raises ValueError listing the entries for an unknown name."""
    found = lookup(name)
    if found is None:
        raise ValueError(f"{name!r} is not in the catalogue; it has {', '.join(entries())}, or give a model directory")
    model = _data()["models"][found.entry]
    if "config" in model:
        spec = spec_from_config({"torch_dtype": "bfloat16", **model["config"]}, found.entry)
        return ModelFacts(name=served_name or found.entry, spec=spec)
    return facts_from_shape(model["shape"], served_name or found.entry)


def model_facts(source: str, served_name: str | None = None) -> ModelFacts:
    """Facts of a model directory, a catalogue name, or a Hugging Face id, of which only config.json is downloaded.

    Raises ValueError, in one line, where `source` is none of these.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        directory = read_model_dir(path)
        return ModelFacts(name=served_name or directory.served_name, spec=directory.spec)
    if lookup(source) is not None:
        return catalogue_facts(source, served_name)
    if is_hub_id(source):
        return _hub_facts(source, served_name)
    raise ValueError(
        f"{source!r} is no model directory, no Hugging Face id and not in the catalogue ({', '.join(entries())})"
    )


def _hub_facts(repository: str, served_name: str | None) -> ModelFacts:
    from huggingface_hub import hf_hub_download  # late: slow to import, and a catalogue needs no network
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        config = hf_hub_download(repository, "config.json")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"cannot get config.json of {repository}: {reason}; give a model directory") from None
    return ModelFacts(name=served_name or repository, spec=spec_from_config(read_json(Path(config)), repository))


def facts_from_shape(shape: Mapping[str, Any], name: str) -> ModelFacts:
    """Facts of a model of a family that is not served, from numbers.

    Raises UnsupportedModelError for kinds of KV whose size is not known here.
    """
    attention = shape["attention"]
    if attention["kind"] != "gqa":
        raise UnsupportedModelError(
            f"{name} has attention of kind {attention['kind']!r}; the planner knows what gqa holds in the "
            "cache here and will not guess"
        )
    hidden, num_layers, head_dim = shape["hidden_size"], shape["num_layers"], attention["head_dim"]
    linear = shape.get("linear_attention") or {"layers": 0, "parameters": 0, "state_bytes": 0}
    num_kv_layers = num_layers - linear["layers"]
    gqa = GQASpec(
        num_heads=attention["heads"],
        num_kv_heads=attention["kv_heads"],
        head_dim=head_dim,
        rope=RopeSpec(theta=10000.0, dim=head_dim),
        softmax_scale=head_dim**-0.5,
    )
    ffns = _ffns(shape["ffn"], num_layers)
    gate = attention["heads"] * head_dim * hidden if attention.get("output_gate") else 0
    spec = ModelSpec(
        family=name,
        vocab_size=shape["vocab_size"],
        hidden_size=hidden,
        layers=tuple(LayerSpec(attention=gqa, ffn=ffn) for ffn in ffns[:num_kv_layers]),
        norm_eps=1e-6,
        tie_word_embeddings=shape.get("tied", False),
        max_position_embeddings=shape["max_positions"],
        dtype="bfloat16",
    )
    return ModelFacts(
        name=name,
        spec=spec,
        servable=False,
        other_ffns=ffns[num_kv_layers:],
        other_kv_pool_parameters=num_kv_layers * gate + linear["layers"] * linear["parameters"],
        state_bytes=linear["layers"] * linear["state_bytes"],
    )


def _ffns(ffn: Mapping[str, Any], num_layers: int) -> tuple[FFNSpec, ...]:
    shared = None
    if ffn.get("shared_width"):
        shared = SharedExpertSpec(intermediate_size=ffn["shared_width"], gated=ffn.get("shared_gate", False))
    moe = MoEFFNSpec(
        num_experts=ffn["experts"],
        top_k=ffn["top_k"],
        expert_intermediate_size=ffn["width"],
        router=RouterSpec(score="softmax"),
        shared=shared,
    )
    num_dense = ffn.get("dense_layers", 0)
    dense = [DenseFFNSpec(intermediate_size=ffn["dense_width"])] * num_dense if num_dense else []
    return (*dense, *[moe] * (num_layers - num_dense))
