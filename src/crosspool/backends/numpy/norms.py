"""RMSNorm, the only norm of every family."""

import numpy as np

from crosspool.backends.base import FloatArray


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, as `x / sqrt(sum(x^2) + n eps) * (weight sqrt(n))`.

    weight: broadcasts against x, so that (heads, head_dim) norms every head of (num_tokens, heads, head_dim).
    """

    def __init__(self, weight: FloatArray, eps: float) -> None:
        width = weight.shape[-1]
        self._weight = weight * np.float32(np.sqrt(width))
        self._eps = np.array(width * eps, dtype=np.float32)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """x: (..., width) float32, any strides; `out` may be `x`."""
        scale = np.vecdot(x, x)
        scale += self._eps
        scale = np.sqrt(scale)
        normed: FloatArray = np.divide(x, scale[..., None], out=out)
        normed *= self._weight
        return normed
