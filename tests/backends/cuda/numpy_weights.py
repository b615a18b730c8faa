"""A checkpoint's weights on a device, by way of NumPy, as kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights, pack_attention_weights, pack_ffn_weights
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import FLOAT32_TENSORS
from crosspool.weights_pool.loader import ModelWeights


def to_device(tensors: Mapping[str, np.ndarray[Any, Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """NumPy tensors of any float dtype on the device: fp32 for the router's, bfloat16 for the rest."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(
            device, torch.float32 if name in FLOAT32_TENSORS else torch.bfloat16
        )
        for name, array in tensors.items()
    }


def attention_weights_from_numpy(spec: ModelSpec, weights: ModelWeights, device: torch.device) -> AttentionWeights:
    layers = (to_device(tensors, device) for tensors in weights.layers)
    return pack_attention_weights(spec, to_device(weights.model, device), layers)


def ffn_weights_from_numpy(spec: ModelSpec, weights: ModelWeights, device: torch.device) -> tuple[FFNLayerWeights, ...]:
    return pack_ffn_weights(spec, (to_device(tensors, device) for tensors in weights.layers))
