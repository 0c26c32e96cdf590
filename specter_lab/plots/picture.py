"""The timeline as a small static SVG, for pages that run no scripts (a README on GitHub)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

from specter_lab.observe.export import write_whole
from specter_lab.observe.trace import Trace
from specter_lab.plots.bars import Bars, merge_bars, trace_bars
from specter_lab.plots.style import COLOURS, HATCHES, LINE_COLOUR
from specter_lab.plots.timeline import MOST_BOUNDARIES, MOST_LONG_LABELS, MOST_OUTLINES, every_nth, in_lane_order, in_legend_order

WIDTH, HEIGHT = 1000, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 972, 78, 232
MOST_BARS = 2000
INK, PALE = "#24292f", "#d8dee4"
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def save_timeline_svg(trace: Trace, path: str | Path, *, steps: tuple[int, int] | None = None) -> Path:
    """Write the timeline of a trace, or of its steps ``first..last``, as an SVG of 1000 x 320 with its own background.

    Same bars, colours and errors as ``plot_timeline``; the file appears under its name only when it is complete.

    >>> import tempfile
    >>> one = Trace.of([("link", "transfer", 0.0, 5.0, 0, -1, 0, 3, 0, 64, 0, "demand", "used", 0.0)], "simulated")
    >>> save_timeline_svg(one, Path(tempfile.mkdtemp()) / "one.svg").name
    'one.svg'
    """
    return write_whole(path, _draw(trace_bars(trace, steps=steps)))


def _draw(bars: Bars) -> str:
    first_ms, last_ms = bars.window_ms
    scale = (RIGHT - LEFT) / max(last_ms - first_ms, 1e-9)
    shown = merge_bars(bars.table, last_ms - first_ms, MOST_BARS)
    lanes = in_lane_order(shown)
    row = (BOTTOM - TOP) / len(lanes)

    def x(ms: float) -> float:
        return LEFT + (min(max(ms, first_ms), last_ms) - first_ms) * scale

    categories = list(in_legend_order(shown))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"12\">",
        f"<title>{_text(bars.title)}</title><desc>{_text(bars.subtitle)}</desc>",
        f"<defs>{''.join(_hatch(name) for name, _ in categories if name in HATCHES)}</defs>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="white" stroke="{PALE}"/>',
        _label(LEFT, 27, bars.title, 'font-size="16" font-weight="600"'),
        _label(LEFT, 46, bars.subtitle, f'fill="{LINE_COLOUR}"'),
    ]
    for ms in _ticks(first_ms, last_ms):
        parts.append(f'<path d="M{x(ms):.2f} {TOP}V{BOTTOM}" stroke="{PALE}"/>')
        parts.append(_label(x(ms), BOTTOM + 16, f"{ms:,.10g}", f'text-anchor="middle" fill="{LINE_COLOUR}"'))
    outline = 0.5 if len(shown) <= MOST_OUTLINES else 0
    parts.append(_label(LEFT - 12, BOTTOM + 16, "ms", f'text-anchor="end" fill="{LINE_COLOUR}"'))
    for number, lane in enumerate(lanes):
        parts.append(_label(LEFT - 12, TOP + row * (number + 0.5) + 4, lane, 'text-anchor="end"'))
    for name, rows in categories:
        fill = f"url(#{_identifier(name)})" if name in HATCHES else COLOURS[name]
        parts.append(f'<g fill="{fill}" stroke="{COLOURS[name]}" stroke-width="{outline}">')
        for lane, start, duration in zip(rows["lane"], rows["drawn_ms"], rows["duration_ms"], strict=True):
            top, left = TOP + row * (lanes.index(lane) + 0.14), x(start)
            parts.append(f'<rect x="{left:.2f}" y="{top:.1f}" width="{x(start + duration) - left:.2f}" height="{row * 0.72:.1f}"/>')
        parts.append("</g>")
    parts += _steps(bars, x)
    parts += _legend([name for name, _ in categories])
    return "\n".join([*parts, "</svg>\n"])


def _steps(bars: Bars, x: Callable[[float], float]) -> list[str]:
    """A dotted line where each step commits, its label above its middle where there is room."""
    shown = every_nth(bars.steps, MOST_BOUNDARIES)
    parts, free, long = [], 0.0, len(shown) <= MOST_LONG_LABELS
    for step in shown:
        left, right = x(step.start_ms), x(step.end_ms)
        parts.append(f'<path d="M{right:.2f} {TOP - 6}V{BOTTOM}" stroke="{LINE_COLOUR}" stroke-dasharray="2 3"/>')
        label = step.label(long=long)
        middle = (left + right) / 2
        if free <= middle - _width(label) / 2 and middle + _width(label) / 2 < WIDTH:
            parts.append(_label(middle, TOP - 10, label, f'text-anchor="middle" fill="{LINE_COLOUR}" font-size="11"'))
            free = middle + _width(label) / 2
    return parts


def _legend(names: list[str]) -> list[str]:
    parts, left, top = [], float(LEFT), BOTTOM + 34.0
    for name in names:
        if left + 18 + _width(name) > RIGHT:
            left, top = float(LEFT), top + 20
        fill = f"url(#{_identifier(name)})" if name in HATCHES else COLOURS[name]
        parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="12" height="12" fill="{fill}" stroke="{COLOURS[name]}"/>')
        parts.append(_label(left + 18, top + 10.5, name))
        left += 18 + _width(name) + 22
    return parts


def _ticks(first: float, last: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within the range, about eight of them."""
    rough = max(last - first, 1e-9) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)]


def _hatch(name: str) -> str:
    colour = COLOURS[name]
    lines = "M-1 1L1 -1M0 6L6 0M5 7L7 5" + ("M-1 5L1 7M0 0L6 6M5 -1L7 1" if HATCHES[name] == "x" else "")
    return (
        f'<pattern id="{_identifier(name)}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="{colour}"/>'
        f'<path d="{lines}" stroke="white" stroke-width="1" stroke-opacity="0.55"/></pattern>'
    )


def _identifier(name: str) -> str:
    return "hatch-" + "".join(letter if letter.isalnum() else "-" for letter in name)


def _label(x: float, y: float, text: str, attributes: str = "") -> str:
    fill = "" if "fill=" in attributes else f' fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{fill} {attributes}>{_text(text)}</text>'


def _text(text: str) -> str:
    """Escaped, and without what XML can't hold even escaped: control characters, halves of surrogate pairs."""
    return escape(NOT_XML.sub("\ufffd", text))


def _width(text: str) -> float:
    """About how wide it is, in px at 12 px: there is nothing here to measure text with."""
    return 6.6 * len(text)
