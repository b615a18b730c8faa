"""RMSNorm, the only norm of every family."""

import numpy as np

from crosspool.backends.base import FloatArray


def rms_norm(x: FloatArray, weight: FloatArray, eps: float, out: FloatArray | None = None) -> FloatArray:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; `out` may be `x`.

    x: (..., width) float32, any strides. weight: broadcasts against x, so that (heads, head_dim) norms every head.
    """
    scale = np.vecdot(x, x)
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    normed: FloatArray = np.divide(x, scale[..., None], out=out)
    normed *= weight
    return normed
