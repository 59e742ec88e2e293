"""The page as one string: style, library, script and data inside. Knows the assets; knows no plan."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

_CSP: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src {connect}"


def render(document: Mapping[str, Any] | None, *, form: Mapping[str, str] | None = None) -> str:
    """A whole HTML page. `document` is drawn at once; with `form` (field → default) the page can ask its server for others."""
    assets = files("shoal.simulator.page") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    parts = {
        "CSP": _CSP.format(connect="'self'" if form is not None else "'none'"),
        "STYLE": asset("page.css"),
        "DATA": f"window.DOCUMENT = {_literal(document)}; window.FORM = {_literal(form)};",
        "CHARTS": asset("chart.umd.min.js"),
        "SCRIPT": asset("page.js"),
    }
    return re.sub("@@([A-Z]+)@@", lambda mark: parts[mark[1]], asset("page.html"))


def _literal(value: Mapping[str, Any] | None) -> str:
    """JSON that cannot end the script element it stands in. Infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), ensure_ascii=True).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
