"""One decode step as a picture: what the host and both GPUs did when, whole and its first layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.traces.step_trace import HOST, Span, Step

WIDTH, LEFT, RIGHT = 960, 110, 20
ROW, GAP, TOP = 26, 12, 44
FIRST_LAYERS = 4
TOUCHING = 0.3
"""Pixels: bars nearer to each other become one."""

COLOURS = {"crossing": "#dc2626", "work": "#2563eb", "call": "#d97706", "segment": "#94a3b8"}
LEGEND = {"crossing": "put and wait", "work": "other kernels", "call": "CUDA calls", "segment": "rank loops"}
CROSSING = ("norm_put", "wait_norm", "cross", "route_put", "see_")


def _kind(span: Span) -> str:
    if span.track == HOST:
        return "call" if span.is_call else "segment"
    return "crossing" if any(part in span.name for part in CROSSING) else "work"


def step_picture(title: str, spans: Sequence[Span], step: Step, tracks: Sequence[tuple[str, str]]) -> str:
    """SVG. tracks: (track of the spans, what to call it), from top to bottom."""
    margin_us = 0.04 * (step.end_us - step.begin_us)
    layer_us = (step.layers_end_us - step.layers_begin_us) / max(1, step.num_layers - 1)
    whole = (step.begin_us - 4 * margin_us, step.end_us + margin_us)
    first = (step.begin_us - layer_us, step.layers_begin_us + FIRST_LAYERS * layer_us)
    height = 2 * (TOP + len(tracks) * (ROW + GAP)) + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>')
    parts.append(f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>')
    across = LEFT + 420
    for kind, label in LEGEND.items():
        parts.append(f'<rect x="{across}" y="8" width="10" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{across + 14}" y="17" font-size="11">{label}</text>')
        across += 105
    y = TOP
    for name, (begin, end) in (("the whole step", whole), (f"its first {FIRST_LAYERS} layers", first)):
        parts += _panel(name, spans, step, tracks, begin, end, y)
        y += TOP + len(tracks) * (ROW + GAP)
    return "\n".join((*parts, "</svg>\n"))


def _panel(
    name: str,
    spans: Sequence[Span],
    step: Step,
    tracks: Sequence[tuple[str, str]],
    begin: float,
    end: float,
    top: float,
) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def place(moment: float) -> float:
        return LEFT + (min(max(moment, begin), end) - begin) * scale

    bottom = top + len(tracks) * (ROW + GAP)
    low, high = place(step.layers_begin_us), place(step.layers_end_us)
    parts = [
        f'<rect x="{low:.1f}" y="{top}" width="{high - low:.1f}" height="{bottom - top}" fill="#f1f5f9"/>',
        f'<text x="{low:.1f}" y="{top - 4}" font-size="11" fill="#475569">{escape(name)}: between its layers</text>',
        f'<text x="{LEFT}" y="{bottom + 12}" font-size="11">0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{bottom + 12}" font-size="11" text-anchor="end">{end - begin:,.0f} us</text>',
    ]
    for row, (track, label) in enumerate(tracks):
        y = top + row * (ROW + GAP) + GAP / 2
        parts.append(f'<text x="8" y="{y + ROW / 2 + 4:.1f}" font-size="12">{escape(label)}</text>')
        shown = [span for span in spans if span.track == track and span.end_us > begin and span.begin_us < end]
        for bar in _bars(shown, place):
            parts.append(
                f'<rect x="{bar.left:.1f}" y="{y:.1f}" width="{max(0.6, bar.right - bar.left):.1f}" height="{ROW}" '
                f'fill="{COLOURS[bar.kind]}"><title>{escape(bar.tip)}</title></rect>'
            )
    return parts


@dataclass(slots=True)
class _Bar:
    kind: str
    left: float
    right: float
    tip: str


def _bars(spans: Sequence[Span], place: Callable[[float], float]) -> list[_Bar]:
    """A bar for each span, one for those of a kind that touch. Calls come last: they lie on segments that make them."""
    bars: list[_Bar] = []
    for span in sorted(spans, key=lambda span: (span.is_call, span.begin_us)):
        kind, left, right = _kind(span), place(span.begin_us), place(span.end_us)
        if bars and bars[-1].kind == kind and left - bars[-1].right < TOUCHING and span.track != HOST:
            bars[-1].right = max(bars[-1].right, right)
            continue
        bars.append(_Bar(kind, left, right, f"{span.name[:60]}, {span.end_us - span.begin_us:.1f} us"))
    return bars
