"""Figures as short text, with their intervals."""

from collections.abc import Mapping


def cell(estimate: Mapping[str, float], *, with_interval: bool = True) -> str:
    if not with_interval:
        return number(estimate["value"])
    return f"{number(estimate['value'])} ({number(estimate['low'])}-{number(estimate['high'])})"


def number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
