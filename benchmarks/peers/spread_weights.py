"""Dummy weights of vLLM whose routers use all experts, as ours do, by a plugin that its every process loads.

vLLM's own dummy weights are tiny: the routers see nearly the same input for every token and send all tokens to the same
few experts, so a step reads far fewer weights than a real model's would. With norms of one, embeddings of unit variance
and routers of standard deviation 0.02, tokens differ and spread. `write_plugin` makes a folder that, on PYTHONPATH, has
the plugin's entry point; nothing is installed. The plugin imports nothing but vLLM, in vLLM's own processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROUTER_STD = 0.02
EMBEDDING_STD = 1.0
MODULE = "crosspool_spread_weights"
ENTRY_POINTS = f"[vllm.general_plugins]\n{MODULE} = {MODULE}:register\n"


def spread(parameters: Iterable[tuple[str, Any]]) -> int:
    """Set norms, embeddings and routers among (name, tensor) pairs; how many were set."""
    num = 0
    for name, parameter in parameters:
        setting = _setting(name)
        if setting is not None:
            setting(parameter.data)
            num += 1
    return num


def _setting(name: str) -> Callable[[Any], Any] | None:
    if name.endswith(("norm.weight", "layernorm.weight")):
        return lambda tensor: tensor.fill_(1.0)
    if name.endswith("embed_tokens.weight"):
        return lambda tensor: tensor.normal_(0.0, EMBEDDING_STD)
    if name.endswith(".mlp.gate.weight"):
        return lambda tensor: tensor.normal_(0.0, ROUTER_STD)
    if name.endswith("e_score_correction_bias"):
        return lambda tensor: tensor.zero_()
    return None


def register() -> None:
    """Called by vLLM in each of its processes: dummy weights are spread right after they are made."""
    from vllm.model_executor.model_loader.dummy_loader import (  # type: ignore[import-not-found]
        DummyModelLoader,
    )

    plain = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, *rest: Any) -> None:
        plain(self, model, *rest)
        num = spread(model.named_parameters())
        if num == 0:
            raise RuntimeError("no norm, embedding or router was found to spread; the model's names have changed")
        print(f"spread {num} tensors, so that routers use all experts", flush=True)

    DummyModelLoader.load_weights = load_weights


def write_plugin(directory: Path) -> Path:
    """A folder with this module under its own name and an entry point beside it."""
    info = directory / f"{MODULE}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    shutil.copyfile(__file__, directory / f"{MODULE}.py")
    return directory
