"""RMSNorm, the only norm of every family."""

import math

import numpy as np

from crosspool.backends.base import FloatArray


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, as `x / sqrt(sum(x^2) + n eps) * (weight sqrt(n))`.

    weight: broadcasts against x, so that (heads, head_dim) norms every head of (num_tokens, heads, head_dim).
    """

    def __init__(self, weight: FloatArray, eps: float) -> None:
        width = weight.shape[-1]
        self._weight = weight * np.float32(np.sqrt(width))
        self._eps = float(width * eps)
        self._eps_array = np.array(self._eps, dtype=np.float32)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """x: (..., width) float32, any strides; `out` may be `x`."""
        if x.ndim == 1:
            return self._one(x, out)
        scale = np.vecdot(x, x)
        scale += self._eps_array
        np.sqrt(scale, scale)
        normed: FloatArray = np.multiply(x, self._weight / scale[..., None], out)
        return normed

    def _one(self, x: FloatArray, out: FloatArray | None) -> FloatArray:
        """The same for one vector: its scale is a plain number, which spares half of the array operations."""
        scale = np.array(1 / math.sqrt(float(x.dot(x)) + self._eps), dtype=np.float32)
        normed: FloatArray = np.multiply(x, scale, out)
        normed *= self._weight
        return normed
