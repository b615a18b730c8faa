"""Line charts as SVG text: for reports that open anywhere, without a plotting library."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
TICKS = 5

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points], *, log_x: bool = False) -> str:
    """One line for each entry, its name in the legend. With log_x, points at or below 0 are left out."""
    kept = {name: [(x, y) for x, y in points if not log_x or x > 0] for name, points in lines.items()}
    xs = [x for points in kept.values() for x, _ in points] or [1.0]
    top = _round_up(max((y for points in kept.values() for _, y in points), default=1.0))
    ticks = _log_ticks(min(xs), max(xs)) if log_x else _ticks(_round_up(max(xs)))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> str:
        share = (log10(x / low) / log10(high / low)) if log_x else (x - low) / (high - low)
        across = LEFT + share * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{TOP + (1 - y / top) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#334155">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for y in _ticks(top):
        across, down = place(low, y).split(",")
        parts.append(f'<path d="M{across} {down}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(down) + 4:.1f}" text-anchor="end">{_short(y)}</text>')
    for x in ticks:
        across = place(x, 0).split(",")[0]
        parts.append(f'<path d="M{across} {TOP}V{HEIGHT - BOTTOM}" stroke="#f1f5f9"/>')
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_short(x)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
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
            path = " ".join(place(x, y) for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        legend -= 7.0 * len(name) + 26
        parts.append(f'<path d="M{legend:.0f} 14h14" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{legend + 18:.0f}" y="18">{escape(name)}</text>')
    return "\n".join((*parts, "</svg>\n"))


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * power >= value * 0.999999)


def _ticks(top: float) -> list[float]:
    return [top * tick / TICKS for tick in range(TICKS + 1)]


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
