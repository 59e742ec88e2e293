"""`python -m tests.chaos`: runs one or several models in turn, prints the tables, and ends with 1 when anything was wrong."""

import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.killer import Hit
from tests.chaos.outcome import Outcome
from tests.chaos.report import show, write_json
from tests.chaos.run import News, Result, Setting, run

_LINE_EVERY_S = 15.0  # where there is no terminal


@click.command()
@click.option("--model", "models", multiple=True, default=("random",), help="random (four layers), or as `shoal serve` takes it.")
@click.option("--requests", "counts", type=int, multiple=True, default=(5000,), help="How many; one for each --model.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of questions, callers that leave, and strikes.")
@click.option("--kills", type=int, default=None, help="At most so many strikes a model; default: as many as there is time for.")
@click.option("--rate", type=float, default=0.0, help="Requests a second; default: 10 of random, 1.5 of others.")
@click.option("--minutes", type=float, default=12.0, show_default=True, help="Of one model; later no request is sent.")
@click.option("--local-ray", is_flag=True, help="The controller's own Ray, which dies with it: the controller is left alone.")
@click.option("--transfer-backend", default="auto", show_default=True, help="As `shoal serve` takes it.")
@click.option("--no-faults", is_flag=True, help="Leave transfers alone.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything there too.")
@click.option("--keep-logs", type=click.Path(path_type=Path), help="A folder for the clusters' logs.")
def main(
    models: tuple[str, ...],
    counts: tuple[int, ...],
    seed: int,
    kills: int | None,
    rate: float,
    minutes: float,
    local_ray: bool,
    transfer_backend: str,
    no_faults: bool,
    json_path: Path | None,
    keep_logs: Path | None,
) -> None:
    """Hurt a cluster of two prefill and two decode workers in every way, and check everything that comes back."""
    if len(models) != len(counts):
        raise click.UsageError("give --requests once for each --model")
    console = Console()
    results: list[Result] = []
    for model, count in zip(models, counts, strict=True):
        setting = Setting(
            model,
            count,
            seed,
            rate,
            kills,
            own_ray=not local_ray,
            faults=not no_faults,
            minutes=minutes,
            transfer_backend=transfer_backend,
        )
        with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as scratch:
            folder = keep_logs / model if keep_logs else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            with _Progress(console, count) as progress:
                results.append(run(setting, folder, progress.news))
        num_bad = len(results[-1].verdict.violations)
        console.print(f"{model}: {results[-1].num_asked} requests, {num_bad} violations", highlight=False)
    show(results, console)
    if json_path is not None:
        write_json(results, json_path)
    sys.exit(1 if any(result.verdict.violations for result in results) else 0)


class _Progress:
    """A bar on a terminal, a line now and then elsewhere; a line for each strike in both."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("requests", total=num_requests)
        self._num, self._num_errors, self._said_at = 0, 0, time.monotonic()
        self._num_requests = num_requests
        self.news = News(self._ended, self._struck)

    def __enter__(self) -> "_Progress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _ended(self, outcome: Outcome) -> None:
        self._num += 1
        self._num_errors += outcome.leave is None and bool(outcome.error)
        self._bars.update(self._task, completed=self._num)
        if not self._console.is_terminal and time.monotonic() - self._said_at > _LINE_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(f"{self._num} of {self._num_requests} requests, {self._num_errors} declared errors")

    def _struck(self, hit: Hit) -> None:
        times = [
            f"{what} {value:.2f} s" for what, value in (("dropped", hit.dropped_s), ("back", hit.back_s)) if value is not None
        ]
        fault = f"  {hit.fault}" if hit.fault else ""
        self._console.print(f"{hit.deed} {hit.name} ({hit.moment}): {', '.join(times)}{fault}", highlight=False)


if __name__ == "__main__":
    main()
