"""Gated activations through tanh: `x * sigmoid(x)` is `h + h * tanh(h)` with h = x / 2, and tanh overflows nowhere.

Gates are halved once, in the weights, which is exact. P rows, I the width of gate and of up.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.models.spec import Activation

ONE = np.array(1, dtype=np.float32)
GPT_OSS_ALPHA = np.array(1.702, dtype=np.float32)
GPT_OSS_LIMIT = np.float32(7.0)


def halve_gates(gate_up: FloatArray) -> FloatArray:
    """[gate | up] (..., 2I) made [gate / 2 | up] in place, for matrices (in, out) and biases."""
    gate_up[..., : gate_up.shape[-1] // 2] *= np.float32(0.5)
    return gate_up


def activate(gate_up: FloatArray, activation: Activation) -> FloatArray:
    """(..., I) from [gate / 2 | up] (..., 2I): `silu(gate) * up`, or gpt-oss's clamped swiglu. May overwrite it."""
    width = gate_up.shape[-1] // 2
    half, up = gate_up[..., :width].copy(), gate_up[..., width:]
    if activation == "silu":
        activated = np.tanh(half)
    else:
        np.minimum(half, GPT_OSS_LIMIT / 2, out=half)
        np.clip(up, -GPT_OSS_LIMIT, GPT_OSS_LIMIT, out=up)
        up += ONE
        activated = np.multiply(half, GPT_OSS_ALPHA)
        np.tanh(activated, activated)
    activated += ONE
    activated *= half
    activated *= up
    return activated
