"""`python -m infra.checks.page`: the parts of docs/kubernetes.md that are made: the values, what the defaults render to."""

import re
from collections import defaultdict
from typing import Final

from infra.checks.charts import ROOT, parse
from infra.checks.values import table

PAGE: Final = ROOT / "docs" / "kubernetes.md"
RENDERED: Final = ROOT / "infra" / "rendered" / "default.yaml"
_PARTS: Final = re.compile(r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def objects_table() -> str:
    """The objects of the default values, by kind."""
    names = defaultdict[str, list[str]](list)
    for item in parse(RENDERED.read_text()):
        names[item["kind"]].append(item["metadata"]["name"])
    rows = [f"| {kind} | {', '.join(f'`{name}`' for name in sorted(found))} |" for kind, found in sorted(names.items())]
    return "\n".join(["| kind | names |", "|---|---|", *rows])


def made() -> str:
    """The page as it should be. Raises KeyError for a part that nobody makes."""
    makers = {"values": table, "objects": objects_table}
    return _PARTS.sub(lambda part: part[1] + makers[part[2]]().rstrip() + part[3], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(made())
