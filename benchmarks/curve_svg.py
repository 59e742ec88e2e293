"""Lines over a common x axis as one small SVG, with nothing but text. Knows points; knows no benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 250, 60, 150, 30, 42
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: lines of (x, y) by name."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]
    level: tuple[float, str] | None = None  # a dashed horizontal line and its name


def render(panels: Sequence[Panel]) -> str:
    """The panels below each other."""
    height = _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {index * _HEIGHT})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    max_x = max(x for x, _ in points)
    max_y = 1.08 * max([y for _, y in points] + ([panel.level[0]] if panel.level else [])) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / max_x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y / max_y

    (x0, y0), (x1, y1) = at(0, 0), at(max_x, max_y)
    parts = [
        _text(_LEFT, 18, panel.title, 'font-weight="bold"'),
        f'<path d="M{x0:.1f} {y1:.1f}V{y0:.1f}H{x1:.1f}" fill="none" stroke="black"/>',
        _text((x0 + x1) / 2, _HEIGHT - 8, panel.x_label, 'text-anchor="middle"'),
        _text(14, (y0 + y1) / 2, panel.y_label, f'text-anchor="middle" transform="rotate(-90 14 {(y0 + y1) / 2:.1f})"'),
    ]
    for tick in range(5):
        x, y = at(max_x * tick / 4, max_y * tick / 4)
        parts.append(_text(x, y0 + 14, f"{max_x * tick / 4:.3g}", 'text-anchor="middle"'))
        parts.append(_text(x0 - 5, y + 4, f"{max_y * tick / 4:.3g}", 'text-anchor="end"'))
    if panel.level is not None:
        _, y = at(0, panel.level[0])
        parts.append(f'<path d="M{x0:.1f} {y:.1f}H{x1:.1f}" stroke="grey" stroke-dasharray="4 3"/>')
        parts.append(_text(x1 + 6, y + 4, panel.level[1]))
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [at(x, y) for x, y in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        parts.append(_text(x1 + 6, _TOP + 14 + 15 * index, name, f'fill="{colour}"'))
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
