"""lm-eval tasks through a running server's Score, one visibility after another. Knows lm-eval's call; scores nothing itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One metric of one task under one visibility."""

    task: str
    visibility: str
    metric: str
    value: float
    error: float | None  # standard error, where lm-eval has one
    num_shots: int


def run_tasks(
    names: Sequence[str],
    visibilities: Sequence[str],
    address: str,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include: str | None = None,
) -> list[TaskResult]:
    """Run tasks of lm-eval, or of the folder `include`, through the server at `address`.

    Raises InvalidConfig without lm-eval, for unknown tasks, and where a task's data is not on this machine.
    """
    try:
        import_module("shoal.client.lm_eval_model")
        evaluator, tasks = import_module("lm_eval.evaluator"), import_module("lm_eval.tasks")
    except ModuleNotFoundError as missing:
        raise InvalidConfig(f"{missing.name} is not installed; run: pip install -e '.[eval]'") from missing
    manager = tasks.TaskManager(include_path=include)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise InvalidConfig(f"lm-eval knows no task {unknown[0]!r}; its names are listed by: lm-eval ls tasks")
    found: list[TaskResult] = []
    for visibility in visibilities:
        try:
            results = evaluator.simple_evaluate(
                model="shoal",
                model_args={"address": address, "visibility": visibility},
                tasks=list(names),
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                bootstrap_iters=0,
            )
        except (ConnectionError, FileNotFoundError) as error:
            raise InvalidConfig(
                f"a task's data cannot be had here ({error}); put it into the data sets' cache, or describe a local task in a "
                "YAML file and give its folder with --lm-eval-include"
            ) from error
        found += _results(results, visibility)
    return found


def _results(results: dict[str, Any], visibility: str) -> list[TaskResult]:
    found = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, variant = name.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and metric != "sample_len":
                error = metrics.get(f"{metric}_stderr,{variant}")
                shots = int(results.get("n-shot", {}).get(task, 0))
                found.append(
                    TaskResult(task, visibility, metric, float(value), error if isinstance(error, float) else None, shots)
                )
    return found
