"""matplotlib, where it is installed, without a screen and with the same bytes every time. Knows no figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import InvalidConfig


def check(path: Path) -> None:
    """Raises InvalidConfig for what `figure` could not do, before any time is spent on what it is to show."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as missing:
        raise InvalidConfig("plots need matplotlib; run: pip install -e '.[quality]', or leave the plot out") from missing
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidConfig(f"a plot is written as .png, .svg or .pdf, not {path.name!r}")


@contextmanager
def figure(path: Path, *, num_panels: int, width: float = 11.0, height: float = 3.4, columns: int = 2) -> Iterator[list[Any]]:
    """Axes to draw on; the figure is written to `path` (.png, .svg or .pdf) at the end.

    Raises InvalidConfig as `check` does, and where the file cannot be written.
    """
    check(path)
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("agg")
    matplotlib.rcParams |= {"svg.hashsalt": "shoal", "svg.fonttype": "none"}  # text stays text: small files
    rows = -(-num_panels // columns)
    made, axes = pyplot.subplots(rows, columns, figsize=(width, height * rows), squeeze=False)
    flat = list(axes.flat)
    for unused in flat[num_panels:]:
        unused.axis("off")
    try:
        yield flat[:num_panels]
        made.tight_layout()
        made.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InvalidConfig(f"cannot write the plot {str(path)!r}: {error.strerror}") from error
    finally:
        pyplot.close(made)
