"""Line charts as SVG text: for reports that open anywhere, without a plotting library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
TITLE_LETTER = 9.8
"""Of a letter of a title, in the widest of the usual sans-serif fonts."""
TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Ticks from end to end, evenly or by their logarithms."""

    ticks: Sequence[float]
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool) -> "_Axis":
        return cls(_log_ticks(min(values), max(values)) if is_log else _ticks(max(values)), is_log)

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        low, high = self.ticks[0], self.ticks[-1]
        return log10(value / low) / log10(high / low) if self.is_log else (value - low) / (high - low)


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """One line for each entry, its name in the legend, which has a row of its own where it would meet the title.

    With log_x or log_y, points at or below 0 there are left out.
    """
    kept = {
        name: [(x, y) for x, y in points if (not log_x or x > 0) and (not log_y or y > 0)]
        for name, points in lines.items()
    }
    everywhere = [point for points in kept.values() for point in points] or [(1.0, 1.0)]
    xs = _Axis.over([x for x, _ in everywhere], is_log=log_x)
    ys = _Axis.over([y for _, y in everywhere], is_log=log_y)
    legend_width = sum(_legend_width(name) for name in kept)
    legend_y = 18 if LEFT + TITLE_LETTER * len(title) + legend_width < WIDTH - RIGHT else 36
    top = TOP + legend_y - 18

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + xs.share(x) * (WIDTH - LEFT - RIGHT)
        return across, top + (1 - ys.share(y)) * (HEIGHT - top - BOTTOM)

    low_x, low_y = xs.ticks[0], ys.ticks[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#334155">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for y in ys.ticks:
        across, down = place(low_x, y)
        parts.append(f'<path d="M{across:.1f} {down:.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{_short(y)}</text>')
    for x in xs.ticks:
        across = place(x, low_y)[0]
        parts.append(f'<path d="M{across:.1f} {top}V{HEIGHT - BOTTOM}" stroke="#f1f5f9"/>')
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_short(x)}</text>')
    middle = (top + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    legend = float(WIDTH - RIGHT)
    for number, (name, points) in reversed(list(enumerate(kept.items()))):
        colour = COLOURS[number % len(COLOURS)]
        if points:
            path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        legend -= _legend_width(name)
        parts.append(f'<path d="M{legend:.0f} {legend_y - 4}h14" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{legend + 18:.0f}" y="{legend_y}">{escape(name)}</text>')
    return "\n".join((*parts, "</svg>\n"))


def _legend_width(name: str) -> float:
    return 7.0 * len(name) + 26


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= value * 0.999999)


def _ticks(top: float) -> list[float]:
    """From 0 in even steps to the first that is not below `top`; at most TICKS steps."""
    step = _round_up(top / TICKS)
    return [step * tick for tick in range(max(1, ceil(top / step - 1e-6)) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around both; 1, 2 and 5 times them where they span little."""
    first, last = floor(log10(low)), max(ceil(log10(high)), floor(log10(low)) + 1)
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    every = [step * 10.0**power for power in range(first, last) for step in steps] + [10.0**last]
    start = max((tick for tick in every if tick <= low), default=every[0])
    stop = min((tick for tick in every if tick >= high), default=every[-1])
    kept = [tick for tick in every if start <= tick <= stop]
    return kept if len(kept) > 1 else [every[0], every[-1]]


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
