"""Errors against files of measurements, which are not ours to ship: they are read from a folder the user names.

Files: `efficiency_from_aic.csv` (kernel tables), `splitwise_perf_model.csv` (prompt and token times),
`aic_silicon_sample.csv` (TTFT and TPOT of deployed engines at a concurrency). Knows their columns; knows no published table.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import InvalidConfig
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import PROFILES, Profile
from shoal.simulator.request_cost import decode_step_s
from shoal.simulator.step_cost import StepCost
from shoal.simulator.validation.rows import ErrorSummary, Use
from shoal.visibility import Visibility

Row = dict[str, str]
_SILICON_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}


def summaries(folder: Path) -> list[ErrorSummary]:
    """Errors by file and group; files that are absent are left out. Raises InvalidConfig that names a malformed row."""
    names = Catalogues.shipped()
    rows: list[ErrorSummary] = []
    for file, compare in (
        ("efficiency_from_aic.csv", _kernels),
        ("splitwise_perf_model.csv", _splitwise),
        ("aic_silicon_sample.csv", _silicon),
    ):
        path = folder / file
        if path.exists():
            rows += _summarised(path, compare, names)
    return rows


Errors = Iterator[tuple[str, Use, str, float]]  # (what, use, inputs, relative error)


def _summarised(path: Path, compare: Callable[[Catalogues, Row], Errors], names: Catalogues) -> list[ErrorSummary]:
    groups: dict[tuple[str, Use, str], list[float]] = {}
    with path.open(newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            try:
                for what, use, inputs, error in compare(names, row):
                    groups.setdefault((what, use, inputs), []).append(error)
            except (KeyError, ValueError) as error:
                raise InvalidConfig(f"{path.name}, line {reader.line_num}: {error!r}; is this the expected file?") from error
    return [ErrorSummary.of(what, use, inputs, errors) for (what, use, inputs), errors in sorted(groups.items())]


def _cost(names: Catalogues, model: str, gpu: str, profile: Profile, tp: int, weight_bytes: float = 2.0) -> StepCost:
    spec = names.model(model).with_precision(weight_bytes=weight_bytes)
    return StepCost(spec, Machine(names.gpu(gpu), profile, tp), Visibility(boundary_tokens=1))


def _kernels(names: Catalogues, row: Row) -> Errors:
    gpu = row["system"].removesuffix("_sxm")
    cost = _cost(names, "llama-3.1-8b", gpu, PROFILES[f"kernels-{gpu}"], 1)
    context, batch = int(row["ctx"]), int(row["batch"])
    ours = cost.prefill_s(context) if row["phase"] == "prefill" else decode_step_s(cost, batch, context, 0)
    yield "kernel tables", Use.FIT, f"Llama-3.1-8B, {gpu.upper()}, {row['phase']}", 1e3 * ours / float(row["aic_ms"]) - 1


def _splitwise(names: Catalogues, row: Row) -> Errors:
    """One batch of equal prompts at once, then `token_size` steps, whose mean time is at half of them."""
    gpu = row["hardware"].removesuffix("-80gb")
    model = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}[row["model"]]
    if gpu.endswith("pcap"):
        return  # power-capped: another machine than the catalogue's
    prompt, batch, tp = int(row["prompt_size"]), int(row["batch_size"]), int(row["tensor_parallel"])
    for profile in (PROFILES[f"kernels-{gpu}"], PROFILES["engine"]):
        cost = _cost(names, model, gpu, profile, tp)
        prompt_s = batch * cost.prefill_s(prompt)
        token_s = decode_step_s(cost, batch, prompt, int(row["token_size"]) // 2)
        inputs = f"{cost.model.name}, {gpu.upper()}, profile {profile.name}"
        yield "Splitwise prompt time", Use.PREDICT, inputs, 1e3 * prompt_s / float(row["prompt_time"]) - 1
        yield "Splitwise token time", Use.PREDICT, inputs, 1e3 * token_s / float(row["token_time"]) - 1


def _silicon(names: Catalogues, row: Row) -> Errors:
    """Colocated engines at concurrency B: TPOT = a step of B rows + B/out prefills per step, each stalling every row."""
    system, precision = row["system"].removesuffix("_sxm"), row["precision"] or "bf16"
    if row["model_path"] not in _SILICON_MODELS or row["mode"] != "agg" or precision not in ("bf16", "fp8"):
        return
    if system not in ("h100", "h200", "b200"):
        return
    prompt, out, batch, tp = (int(row[name]) for name in ("isl", "osl", "batch_size", "tp_size"))
    for profile in (PROFILES["kernels-h100"], PROFILES["engine"]):
        cost = _cost(names, _SILICON_MODELS[row["model_path"]], system, profile, tp, 1.0 if precision == "fp8" else 2.0)
        ours = decode_step_s(cost, batch, prompt, out // 2) + batch / out * cost.prefill_s(prompt)
        inputs = f"{cost.model.name} {precision}, {system.upper()}, profile {profile.name}"
        yield "engines' TPOT (colocated)", Use.PREDICT, inputs, 1e3 * ours / float(row["silicon_tpot_ms"]) - 1
