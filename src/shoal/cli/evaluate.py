"""`shoal eval`: what each visibility costs a model in quality. Chooses tasks and writes files; measures nothing itself."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from shoal.cli.evaluate_tables import print_harness, print_needles, print_rates, print_scores
from shoal.cli.failure import told_in_one_line
from shoal.cli.progress_bar import progress_bar
from shoal.cli.quality_options import data_options, load, load_adapted, writing
from shoal.cli.quality_room import quality_module
from shoal.errors import InvalidConfig
from shoal.model_files import DEFAULT_MODEL
from shoal.visibility import Visibility, VisibilityKind

TASKS: Final = ("perplexity", "curve", "baselines", "loops", "needle", "choices", "humaneval")
_HARNESS: Final = "lm-eval:"
_CALIBRATION: Final = "docstrings:argparse,asyncio,datetime,decimal,email,logging,unittest"


@click.command(name="eval")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--visibility", "-v", "visibilities", multiple=True, metavar="TEXT", help="May be repeated. full is always there.")
@click.option(
    "--tasks",
    default="perplexity",
    show_default=True,
    metavar="NAMES",
    help=f"Some of {', '.join(TASKS)} and lm-eval:TASK, with commas between.",
)
@data_options
@click.option("--adapter", metavar="FOLDER", help="Measure MODEL with this adapter, beside full depth without it.")
@click.option("--batch-size", type=int, default=4, show_default=True, help="Examples at once.")
@click.option(
    "--depth", type=int, metavar="K", help="baselines; curve's anchors and boundary. Default: the first --visibility's."
)
@click.option("--depths", metavar="NUMBERS", help="curve: K with commas between. Default: every second from half the layers up.")
@click.option("--answers", type=int, default=16, show_default=True, help="loops: how many prompts are answered.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="loops: tokens of an answer.")
@click.option("--needle-lengths", default="256,512,1024", show_default=True, metavar="NUMBERS", help="Tokens of a prompt.")
@click.option("--needle-depths", default="0,0.25,0.5,0.75,1", show_default=True, metavar="NUMBERS", help="0 is the beginning.")
@click.option("--needles", "per_cell", type=int, default=2, show_default=True, help="Prompts for each length and depth.")
@click.option(
    "--questions",
    default="mmlu-dev",
    show_default=True,
    metavar="FILE|mmlu-dev",
    help="choices: a .jsonl file, or MMLU's development questions out of lm-eval's package.",
)
@click.option("--num-questions", type=int, default=281, show_default=True, help="choices: the first so many.")
@click.option("--problems", type=int, default=164, show_default=True, help="humaneval: the first so many.")
@click.option("--run-code", is_flag=True, help="humaneval: yes, run what the model writes, in a process with limits.")
@click.option("--server", metavar="HOST:PORT", help="lm-eval: a running server, which scores.")
@click.option("--lm-eval-include", metavar="FOLDER", help="lm-eval: where more tasks are described.")
@click.option("--limit", type=int, metavar="N", help="lm-eval: examples of a task.")
@click.option("--shots", type=int, metavar="N", help="Examples before each question. Default: the lm-eval task's; choices: none.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write every figure.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")
def evaluate(
    model: str,
    visibilities: tuple[str, ...],
    tasks: str,
    data: str,
    device: str,
    threads: int | None,
    batch_size: int,
    adapter: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Measure MODEL (a name, a .gguf file or a folder) under some visibilities, beside full depth.

    \b
    shoal eval -v speed:22 -v pop:20                         perplexity, KL, agreement on prose that Python brings
    shoal eval --tasks curve --plot curve.svg --depth 22     over K, anchors and boundary
    shoal eval --tasks baselines --depth 20                  beside dropped layers, SliceGPT, Wanda, int8
    shoal eval -v pop:20 --tasks loops,needle --chat --data mine.jsonl
    shoal eval -v pop:20 --tasks lm-eval:arc_easy --server 127.0.0.1:50051
    """
    with told_in_one_line():
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        _check(names, options, batch_size)
        texts = ["full", *(str(Visibility.parse(text)) for text in visibilities)]
        texts = list(dict.fromkeys(texts))
        found: dict[str, Any] = {}
        harness = [name.removeprefix(_HARNESS) for name in names if name.startswith(_HARNESS)]
        own = [name for name in names if name in TASKS]
        if plot_path is not None:
            quality_module("plotting").check(plot_path)
        if own:
            taken = {name: options[name] for name in ("max_examples", "prompt_tokens", "response_tokens", "chat", "seed")}
            files, decoder, loaded = load(model, data, threads, device, **taken)
            with progress_bar() as told:
                tuned = None if adapter is None else load_adapted(model, adapter, device)
                suite = quality_module("evaluate.suite").Suite(
                    files, decoder, loaded, tuned=tuned, batch_size=batch_size, progress=told
                )
                num_layers = files.config.shape.num_layers
                run = _Tasks(suite, texts, options, num_layers, loaded, _calibration(data, files, taken), plot_path)
                for name in own:
                    found[name] = run.run(name)
            found |= {"model": files.name, "revision": files.revision, "adapter": adapter or "", "data": loaded.name}
        if harness:
            room = quality_module("evaluate.harness")
            found["lm-eval"] = room.run_tasks(
                harness,
                texts,
                options["server"],
                limit=options["limit"],
                num_fewshot=options["shots"],
                include=options["lm_eval_include"],
            )
        if json_path is not None:
            with writing(json_path):
                json_path.write_text(json.dumps(found, indent=1, default=asdict) + "\n")
        _print(found)


class _Tasks:
    """The tasks by name, with their options."""

    def __init__(
        self,
        suite: Any,
        texts: list[str],
        options: dict[str, Any],
        num_layers: int,
        loaded: Any,
        calibration: Callable[[], Any],
        plot: Path | None,
    ) -> None:
        self._suite, self._texts, self._options, self._num_layers = suite, texts, options, num_layers
        self._loaded, self._calibration, self._plot = loaded, calibration, plot

    def run(self, name: str) -> Any:
        suite, texts, options = self._suite, self._texts, self._options
        match name:
            case "perplexity":
                return suite.perplexity(texts)
            case "curve":
                return self._curve()
            case "baselines":
                return suite.baselines(self._depth(), self._calibration())
            case "loops":
                return suite.loops(texts, options["answers"], options["max_tokens"])
            case "needle":
                lengths = [int(value) for value in _numbers("--needle-lengths", options["needle_lengths"])]
                depths = _numbers("--needle-depths", options["needle_depths"])
                return suite.needles(texts, lengths, depths, options["per_cell"], options["seed"])
            case "choices":
                return suite.choices(texts, options["questions"], options["num_questions"], options["shots"] or 0)
        return suite.humaneval(texts, options["problems"])

    def _curve(self) -> Any:
        room = quality_module("evaluate.curves")
        given = self._options["depths"]
        depths = range(self._num_layers // 2, self._num_layers, 2)
        chosen = [int(value) for value in _numbers("--depths", given)] if given else list(depths)
        if outside := [depth for depth in chosen if not 1 <= depth < self._num_layers]:
            raise InvalidConfig(f"--depths has {outside[0]}; this model's K goes from 1 to {self._num_layers - 1}")
        lines = room.curves(chosen, self._depth())
        scores = self._suite.perplexity(room.needed(lines))
        if self._plot is not None:
            room.draw(lines, scores, self._plot)
        return scores

    def _depth(self) -> int:
        """--depth, or K of the first visibility that has one, or two thirds of the layers as POP's authors choose it."""
        depth: int | None = self._options["depth"]
        for text in self._texts:
            visibility = Visibility.parse(text)
            if depth is None and visibility.kind is not VisibilityKind.FULL:
                depth = visibility.prefill_layers
        depth = depth or max(1, 2 * self._num_layers // 3)
        if not 1 <= depth < self._num_layers:
            raise InvalidConfig(f"--depth {depth} must lie in 1…{self._num_layers - 1} for this model")
        return depth


def _calibration(data: str, files: Any, taken: dict[str, Any]) -> Callable[[], Any]:
    """What Wanda, SliceGPT and ShortGPT look at: docstrings, unless those are what is scored; then the topics."""
    room = quality_module("data")
    source = "python-topics" if data.startswith("docstrings") else _CALIBRATION
    tokens = min(512, files.config.shape.max_context // 2)
    options = room.DataOptions(max_examples=8, prompt_tokens=tokens - 1, response_tokens=1, seed=taken["seed"])
    return lambda: room.load_data(source, files, options).examples


def _check(names: list[str], options: dict[str, Any], batch_size: int) -> None:
    """Refuse before anything is loaded what would fail after minutes."""
    if not names:
        raise InvalidConfig(f"--tasks is empty; give some of {', '.join(TASKS)} or lm-eval:TASK")
    for name in names:
        if name not in TASKS and not name.startswith(_HARNESS):
            raise InvalidConfig(f"--tasks has {name!r}; known are {', '.join(TASKS)} and lm-eval:TASK")
    if "humaneval" in names and not options["run_code"]:
        raise InvalidConfig("humaneval runs programs that the model writes, in a process with limits; allow it by --run-code")
    if any(name.startswith(_HARNESS) for name in names) and not options["server"]:
        raise InvalidConfig("lm-eval tasks are scored by a server; start one with `shoal serve` and give --server HOST:PORT")
    for name, least in (("answers", 1), ("max_tokens", 1), ("per_cell", 1), ("problems", 1), ("num_questions", 1)):
        if options[name] < least:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be at least {least}")
    if batch_size < 1:
        raise InvalidConfig("--batch-size must be at least 1")
    depths = _numbers("--needle-depths", options["needle_depths"])
    if not all(0 <= depth <= 1 for depth in depths):
        raise InvalidConfig("--needle-depths must lie between 0 and 1")
    if not all(length >= 1 and length == int(length) for length in _numbers("--needle-lengths", options["needle_lengths"])):
        raise InvalidConfig("--needle-lengths must be whole numbers of tokens")


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidConfig(f"{flag} {text!r} must be numbers with commas between") from None


def _print(found: dict[str, Any]) -> None:
    for name in ("perplexity", "curve", "baselines"):
        if name in found:
            source = found["data"] + (f", with adapter {found['adapter']}" if found["adapter"] and name != "baselines" else "")
            print_scores(name, source, found[name])
    print_rates(found.get("loops", ()), found.get("choices", ()), found.get("humaneval", ()))
    print_needles(found.get("needle", ()))
    print_harness(found.get("lm-eval", ()))
