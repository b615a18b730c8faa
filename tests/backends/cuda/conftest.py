"""A tiny model for all, and Triton's interpreter where there is no GPU: decided when its kernels are first read."""

import importlib.util
import os
from pathlib import Path

import pytest

from crosspool.models.directory import ModelDirectory, read_model_dir
from tests.support.tiny_models import write_tiny_model

if importlib.util.find_spec("triton") is not None and not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor, scope):
        """Scalars are arrays of one element there, which NumPy 2.5 no longer takes for integers."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_scalars


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> ModelDirectory:
    """A tiny MoE model in bfloat16, for modules that have no other of their own."""
    path = tmp_path_factory.mktemp("tiny_model") / "tiny"
    return read_model_dir(write_tiny_model(path, "qwen3_moe", dtype="bfloat16", tokenizer=False))
