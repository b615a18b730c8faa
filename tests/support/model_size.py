"""Sizes of models that only tests ask for."""

from __future__ import annotations

from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import Pool, model_tensors


def num_parameters(spec: ModelSpec, pool: Pool | None = None) -> int:
    """Parameters of the model, or of its share in one pool."""
    return sum(tensor.num_elements for tensor in model_tensors(spec) if pool in (None, tensor.pool))
