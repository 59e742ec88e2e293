"""A small SVG of several lines over time, each scaled to its own mean after settling. Knows no process."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 360, 60, 20
_COLOURS = ("#1b6ca8", "#c8553d", "#3c8d5a", "#8e5aa8", "#b8860b", "#444444", "#2aa198", "#d16ba5")


def lines_svg(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, low: float, high: float) -> str:
    """`series`: (seconds, share) by name; shares outside low…high are cut at the edge."""
    last_s = max((points[-1][0] for points in series.values() if points), default=1.0) or 1.0
    plot_w, plot_h = _WIDTH - _LEFT - 150, _HEIGHT - 2 * _TOP - 20

    def place(at_s: float, share: float) -> str:
        y = _TOP + plot_h * (1 - (min(high, max(low, share)) - low) / (high - low))
        return f"{_LEFT + plot_w * at_s / last_s:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="{_LEFT}" y="14">{escape(title)}</text>')
    for share in (low, 1.0, high):
        x, y = place(0, share).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_LEFT + plot_w}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{share:.0%}</text>')
    for step in range(7):
        at_s = last_s * step / 6
        x = place(at_s, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{_TOP + plot_h + 18}" text-anchor="middle">{at_s / 60:.0f} min</text>')
    for index, (name, points) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(place(at_s, share) for at_s, share in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_LEFT + plot_w + 12}" y="{_TOP + 14 + 18 * index}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
