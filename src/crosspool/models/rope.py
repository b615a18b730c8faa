"""Rotary frequencies: what every backend multiplies positions with.

A token at position p turns pair i by the angle `p * inv_freq[i]`; cos and sin are then multiplied by the attention
factor. Float64 throughout, so that backends differ only where they round. Sources: RoPE (arXiv 2104.09864), yarn
(arXiv 2309.00071), and the frequency rule of Llama 3.1.
"""

import math

import numpy as np
import numpy.typing as npt

from crosspool.models.spec import RopeScaling, RopeSpec

Float64Array = npt.NDArray[np.float64]


def inv_freq(rope: RopeSpec) -> Float64Array:
    """(dim / 2,) float64: radians per position of each rotated pair, scaling included."""
    plain: Float64Array = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    scaling = rope.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, rope, scaling)


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with; one except under yarn."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Yarn's growth of attention logits with the stretch `factor`; one where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Float64Array, scaling: RopeScaling) -> Float64Array:
    """Waves shorter than the trained length / high_freq_factor stay, longer than / low_freq_factor are stretched."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # full turns over the trained length
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return plain * ((1 - smooth) / scaling.factor + smooth)


def _yarn(plain: Float64Array, rope: RopeSpec, scaling: RopeScaling) -> Float64Array:
    """A ramp over the pairs: those that turn more than beta_fast times stay, fewer than beta_slow are stretched."""
    low = _pair_of_turns(scaling.beta_fast, rope, scaling)
    high = _pair_of_turns(scaling.beta_slow, rope, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    stretched = np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    result: Float64Array = plain / scaling.factor * stretched + plain * (1 - stretched)
    return result


def _pair_of_turns(num_turns: float, rope: RopeSpec, scaling: RopeScaling) -> float:
    """The (fractional) pair that makes `num_turns` full turns over the trained length."""
    return rope.dim * math.log(scaling.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))
