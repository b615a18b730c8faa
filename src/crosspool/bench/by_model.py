"""Values of flags that may differ by model: `VALUE` for all, `MODEL=VALUE` for one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from crosspool.workload.arrivals import ArrivalProcess, GammaBursts, Poisson
from crosspool.workload.formats.plain import read_table
from crosspool.workload.lengths import Fixed, Lengths, Lognormal, Recorded

T = TypeVar("T")


def by_model(flag: str, words: Sequence[str], models: Sequence[str], parse: Callable[[str], T]) -> Mapping[str, T]:
    """Each model's value; one without is left out. Raises ValueError naming flag, word and remedy."""
    common: T | None = None
    own: dict[str, T] = {}
    for word in words:
        name, found, text = word.rpartition("=")
        try:
            value = parse(text)
        except ValueError as error:
            raise ValueError(f"--{flag} is {word!r}: {error}") from None
        if not found:
            common = value
        elif name in models:
            own[name] = value
        else:
            raise ValueError(f"--{flag} names {name!r}; the models are {', '.join(models)}")
    everyone = {} if common is None else dict.fromkeys(models, common)
    return {**everyone, **own}


def parse_rate(text: str) -> float:
    """Requests per second; `inf`: all at once."""
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise ValueError("give requests per second above 0, or inf")
    return rate


def check_burstiness(burstiness: float) -> None:
    if not 0 < burstiness < float("inf"):
        raise ValueError(f"burstiness is {burstiness}; it must be above 0 (1: Poisson, less: bursts)")


def arrivals(rate: float, burstiness: float) -> ArrivalProcess | None:
    """burstiness: shape of the Gamma intervals, as in vLLM: 1 is Poisson, less is burstier. None for all at once."""
    if rate == float("inf"):
        return None
    return Poisson(rate_rps=rate) if burstiness == 1.0 else GammaBursts(rate_rps=rate, cv=burstiness**-0.5)


def parse_length(text: str) -> tuple[float, float]:
    """(mean, coefficient of variation) of `512` (all alike) or `512~1.2` (log-normal)."""
    mean, found, cv = text.partition("~")
    try:
        numbers = float(mean), float(cv) if found else 0.0
    except ValueError:
        numbers = (-1.0, 0.0)
    if numbers[0] < 1 or numbers[1] < 0 or not np.isfinite(numbers).all():
        raise ValueError("give tokens, 1 or more, or MEAN~CV for a log-normal distribution")
    return numbers


def lengths(prompt: tuple[float, float], output: tuple[float, float]) -> Lengths:
    """Prompt and output of one model, each of a mean and a coefficient of variation."""
    if prompt[1] == 0 and output[1] == 0:
        return Fixed(prompt_tokens=round(prompt[0]), output_tokens=round(output[0]))
    tiny = 1e-6  # of a side that does not vary
    return Lognormal(
        prompt_mean=prompt[0],
        output_mean=output[0],
        prompt_cv=prompt[1] or tiny,
        output_cv=output[1] or tiny,
    )


def recorded_lengths(path: str) -> Lengths:
    """Pairs of a table with prompt and output tokens."""
    table = read_table(Path(path))
    return Recorded(
        prompt_tokens=np.asarray(table.prompt_tokens, dtype=np.int64),
        output_tokens=np.asarray(table.output_tokens, dtype=np.int64),
    )
