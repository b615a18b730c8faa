"""How long prompts and outputs are, always as pairs: a prompt and its own output are drawn together."""

from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import Protocol

import numpy as np

from crosspool.workload.trace import FloatColumn, IntColumn

Pairs = tuple[IntColumn, IntColumn]


class Lengths(Protocol):
    """A joint distribution of prompt and output tokens."""

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        """`num` independent (prompt_tokens, output_tokens), each at least 1."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Every request alike."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        return np.full(num, self.prompt_tokens, np.int64), np.full(num, self.output_tokens, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """Pairs seen in a trace, drawn again with replacement; prompt and output of a row stay together."""

    prompt_tokens: IntColumn
    output_tokens: IntColumn

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens) or len(self.prompt_tokens) != len(self.output_tokens):
            raise ValueError(
                f"{len(self.prompt_tokens)} prompts and {len(self.output_tokens)} outputs; give one pair or more"
            )

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        rows = rng.integers(0, len(self.prompt_tokens), num)
        return np.maximum(1, self.prompt_tokens[rows]), np.maximum(1, self.output_tokens[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lognormal:
    """Log-normal prompt and output with given means and coefficients of variation.

    correlation: of the two logarithms; -1 to 1. Tokens are rounded and at least 1; longest: cut at this many (0: none).
    """

    prompt_mean: float
    output_mean: float
    prompt_cv: float = 1.0
    output_cv: float = 1.0
    correlation: float = 0.0
    longest: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_mean", "output_mean", "prompt_cv", "output_cv"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation is {self.correlation}; it must lie between -1 and 1")

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        first, second = _stratified_normals(rng, num), _stratified_normals(rng, num)
        second = self.correlation * first + sqrt(1 - self.correlation**2) * second
        prompt = _lognormal(first, self.prompt_mean, self.prompt_cv)
        output = _lognormal(second, self.output_mean, self.output_cv)
        return _tokens(prompt, self.longest), _tokens(output, self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogUniform:
    """Prompts log-uniform in [shortest, longest]; a fixed output. For bins of long documents."""

    shortest: int
    longest: int
    output_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"prompts from {self.shortest} to {self.longest}; give 1 <= shortest <= longest")

    def draw(self, rng: np.random.Generator, num: int) -> Pairs:
        logs = rng.uniform(log(self.shortest), log(self.longest), num)
        return _tokens(np.exp(logs), self.longest), np.full(num, self.output_tokens, np.int64)


def _stratified_normals(rng: np.random.Generator, num: int) -> FloatColumn:
    """Standard normals, one from each of `num` strata of equal probability, in random order.

    Means over a table of such draws are far closer to the distribution's than those of independent draws.
    """
    levels = (rng.permutation(num) + rng.random(num)) / max(1, num)
    grid = np.linspace(-6.0, 6.0, 4097)
    normal = NormalDist()
    return np.interp(levels, [normal.cdf(float(x)) for x in grid], grid)


def _lognormal(normals: FloatColumn, mean: float, cv: float) -> FloatColumn:
    variance = log(1.0 + cv**2)
    scaled: FloatColumn = np.exp(log(mean) - variance / 2 + sqrt(variance) * normals)
    return scaled


def _tokens(values: FloatColumn, longest: int) -> IntColumn:
    rounded = np.maximum(1, np.rint(values)).astype(np.int64)
    return np.minimum(rounded, longest) if longest else rounded
