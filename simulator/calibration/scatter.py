"""Residuals as one SVG: predicted over measured, over what was measured on a logarithmic axis. Knows numbers and ink."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from shoal.simulator.calibration.points import Residual

_INKS: Final = ("#0b6e8f", "#b3462c", "#1b8a5a", "#8a5a00", "#5b3f8c")
_INK, _SOFT, _LINE, _BAND = "#1c2733", "#5b6b7b", "#dde4ea", "#e8f2f6"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 400, 64, 744, 64, 352
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">'
)


def residual_svg(residuals: Sequence[Residual], title: str) -> str:
    """A self-contained picture; hovering a point names it. The band is ±10 %, whiskers are the spread of the repeats."""
    shown = [each for each in residuals if each.measured_ms > 0]
    parts = [
        _SVG.format(width=_WIDTH, height=_HEIGHT),
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 20, title if shown else f"{title}: no points", _INK, weight=600),
    ]
    if not shown:
        return "\n".join([*parts, "</svg>", ""])
    low = math.floor(math.log10(min(each.measured_ms for each in shown)))
    high = max(low + 1, math.ceil(math.log10(max(each.measured_ms for each in shown))))
    reach = min(1.0, max(0.25, *(abs(each.error) * 1.1 for each in shown)))

    def x(milliseconds: float) -> float:
        return _LEFT + (math.log10(milliseconds) - low) / (high - low) * (_RIGHT - _LEFT)

    def y(error: float) -> float:
        return _TOP + (reach - max(-reach, min(reach, error))) / (2 * reach) * (_BOTTOM - _TOP)

    parts.append(f'<rect x="{_LEFT}" y="{y(0.1):.1f}" width="{_RIGHT - _LEFT}" height="{y(-0.1) - y(0.1):.1f}" fill="{_BAND}"/>')
    step = 0.1 if reach <= 0.5 else 0.25
    for index in range(-int(reach / step), int(reach / step) + 1):
        at = y(index * step)
        parts += [_line(_LEFT, at, _RIGHT, at, _LINE), _text(_LEFT - 8, at + 4, f"{100 * index * step:+.0f}%", _SOFT, "end")]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts += [_line(at, _TOP, at, _BOTTOM, _LINE), _text(at, _BOTTOM + 18, f"{10.0**power:g}", _SOFT, "middle")]
    parts.append(_text(_RIGHT, _HEIGHT - 8, "measured, ms", _SOFT, "end"))
    inks = dict(zip(dict.fromkeys(each.what for each in shown), _INKS, strict=False))
    at = float(_LEFT)
    for kind, ink in inks.items():
        parts += [_dot(at + 5, 40, ink), _text(at + 15, 44, kind, _INK)]
        at += (_RIGHT - _LEFT) * (len(kind) + 4) / sum(len(each) + 4 for each in inks)
    for each in shown:
        at, ink, half = x(each.measured_ms), inks.get(each.what, _SOFT), (each.spread or 0.0) / 2
        words = f"{each.what}, {each.inputs}: measured {each.measured_ms:.3g} ms, predicted {each.predicted_ms:.3g} ms"
        parts.append(_line(at, y(each.error - half), at, y(each.error + half), ink))
        parts.append(_dot(at, y(each.error), ink, words))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, ink: str, anchor: str = "start", weight: int = 400) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-weight="{weight}" fill="{ink}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, ink: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{ink}"/>'


def _dot(x: float, y: float, ink: str, words: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{ink}" opacity="0.8"><title>{escape(words)}</title></circle>'
