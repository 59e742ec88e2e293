"""`python -m shoal.launch.metrics_page`: the tables of docs/metrics.md, from what is declared. Knows which room runs where."""

import importlib
import pkgutil
from typing import Final

import shoal
from shoal.metrics import DECLARED, Declared

SECTIONS: Final = (  # a room's prefix, and the processes that export it
    ("shoal_build", "Every process"),
    ("shoal_router", "Router"),
    ("shoal_controller", "Controller"),
    ("shoal_prefill_worker", "Prefill workers"),
    ("shoal_decode_worker", "Decode workers"),
    ("shoal_transfer", "Prefill workers (`end=\"sent\"`) and decode workers (`end=\"received\"`)"),
    ("shoal_engine", "Prefill and decode workers"),
)  # fmt: skip


def tables() -> str:
    """One table for each section, in the order of declaration. Raises LookupError for a metric of no section."""
    import_everything()
    parts = []
    left = list(DECLARED)
    for prefix, processes in SECTIONS:
        rows = [metric for metric in left if metric.name.startswith(prefix + "_")]
        left = [metric for metric in left if metric not in rows]
        head = f"### {processes}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n"
        parts.append(head + "".join(map(_row, rows)))
    if left:
        raise LookupError(f"no section of the page holds {', '.join(metric.name for metric in left)}")
    return "\n".join(parts)


def import_everything() -> None:
    """Metrics are declared at import. A module that needs an optional package that is missing declares none."""
    for found in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if found.name.startswith("shoal.pb.") or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "shoal":
                raise


def _row(metric: Declared) -> str:
    labels = ", ".join(metric.labels) or "–"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help_text.rstrip('.')} |\n"


if __name__ == "__main__":
    print(tables(), end="")
