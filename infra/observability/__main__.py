"""`python -m infra.observability` writes the dashboard and the alerts; `--check` says whether they are right."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from infra.observability import alerts
from infra.observability.dashboard import dashboard
from infra.observability.promql import declared, faults
from infra.observability.rows import rows

ROOT: Final = Path(__file__).parents[2]
DASHBOARD: Final = ROOT / "infra" / "dashboards" / "shoal.json"
RULES: Final = ROOT / "infra" / "alerts" / "shoal.rules.yaml"
RULE_TESTS: Final = ROOT / "infra" / "alerts" / "shoal.test.yaml"
CHART_FILES: Final = ROOT / "infra" / "charts" / "shoal" / "files"
SCRAPING: Final = ROOT / "infra" / "compose" / "prometheus.yaml"


def generated(runbooks: str = "") -> dict[Path, str]:
    """Every file that is made, and its text; the Helm chart has copies, as a chart reads no file outside its folder."""
    made = {DASHBOARD: dashboard(rows(declared())), RULES: alerts.rules(runbooks)}
    return made | ({CHART_FILES / path.name: text for path, text in made.items()} if CHART_FILES.is_dir() else {})


def wrong(runbooks: str = "") -> list[str]:
    """What is wrong with the files as they lie there, in words; `runbooks` as they were made with."""
    known = declared()
    words = [
        f"{path.relative_to(ROOT)} is not what the code makes; run `python -m infra.observability`"
        for path, text in generated(runbooks).items()
        if not path.exists() or path.read_text() != text
    ]
    for row in rows(known):
        for panel in row.panels:
            words += [f"panel {panel.title!r}: {fault}" for query in panel.queries for fault in faults(query.expression, known)]
    found = anchors((ROOT / alerts.RUNBOOK).read_text())
    for alert in alerts.ALERTS:
        words += [f"alert {alert.name}: {fault}" for fault in faults(alert.expression, known)]
        words += [] if alert.anchor in found else [f"alert {alert.name}: {alerts.RUNBOOK} has no heading #{alert.anchor}"]
    return words


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def promtool() -> list[str]:
    """Run promtool's own checks and the rules' tests; what failed. Says so where there is no promtool."""
    tool = shutil.which("promtool")
    if tool is None:
        print("promtool: skipped, it is not installed (Debian's package `prometheus` has it)")
        return []
    words = []
    for arguments in (["check", "rules", RULES], ["test", "rules", RULE_TESTS], ["check", "config", "--syntax-only", SCRAPING]):
        command = [tool, *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        what = " ".join(map(str, arguments[:2]))
        if ended.returncode:
            words.append(f"promtool {what}: {ended.stdout}{ended.stderr}")
        else:
            print(f"promtool {what}: ok")
    return words


def main() -> int:
    """Exit status 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m infra.observability", description=__doc__)
    parser.add_argument("--check", action="store_true", help="check the files, with promtool where it is installed")
    parser.add_argument("--runbooks", default="", metavar="URL/", help="docs/ of links, written or (--check) expected")
    options = parser.parse_args()
    if options.check:
        words = wrong(options.runbooks) + promtool()
        print("\n".join(words) or "dashboard and alerts are what the declared metrics make")
        return 1 if words else 0
    for path, text in generated(options.runbooks).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
