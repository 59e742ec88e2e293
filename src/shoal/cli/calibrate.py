"""`shoal calibrate`: measures running workers, fits a profile, shows how well it fits. Translates flags and prints."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from shoal.cli.calibration_run import Plan, Result, run, spec_of, workers
from shoal.cli.planning import catalogues, reports_errors, split_list
from shoal.cli.preflight import check
from shoal.cli.progress_bar import progress_bar
from shoal.cli.server_options import Server, server_options
from shoal.cli.workload import tell_notes
from shoal.config.serve import ServeConfig
from shoal.errors import InvalidConfig
from shoal.model_files import DEFAULT_MODEL, open_model
from shoal.simulator.calibration.fit import Fit, notes_on_noise
from shoal.simulator.calibration.measure import Programme
from shoal.simulator.calibration.points import Residual, residuals
from shoal.simulator.calibration.profile_file import write_profile
from shoal.simulator.calibration.scatter import residual_svg
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.tables import to_table
from shoal.simulator.units import parse_tokens
from shoal.simulator.workload.requests import SimRequest, limited, scaled
from shoal.simulator.workload.trace_files import TraceNotes, read_trace
from shoal.visibility import Visibility

_NOISE: Final = 0.15  # repeats further apart than this are warned of
_HEADINGS: Final = {
    "what": "",
    "inputs": "inputs",
    "measured_ms": "measured ms",
    "predicted_ms": "predicted ms",
    "error_share": "error",
    "spread_share": "repeats differ by",
}
_COMPARED: Final = {
    "what": "",
    "live_ms": "live ms",
    "spread_share": "runs differ by",
    "simulated_ms": "simulated ms",
    "error_share": "error",
    "tolerance_share": "tolerance",
    "is_met": "within",
}
_address = click.option("--address", "-a", metavar="HOST:PORT", help="A running router; default: a cluster started for this.")


@dataclass(frozen=True, slots=True)
class _Row:
    what: str
    inputs: str
    measured_ms: float
    predicted_ms: float
    error_share: float
    spread_share: float | None


@dataclass(frozen=True, slots=True)
class _Compared:
    what: str
    live_ms: float
    spread_share: float | None
    simulated_ms: float
    error_share: float
    tolerance_share: float
    is_met: bool


@click.command(short_help="Measure running workers and fit a profile for planning to them.")
@partial(server_options, address=_address)
@click.option("--model", "model_name", help="Default: what is served; without --address as for `shoal serve`.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of a cluster started for this.")
@click.option("--visibility", "texts", multiple=True, help="Which to measure; default: all that the server allows.")
@click.option("--lengths", multiple=True, default=("64,256,512,1k,2k",), show_default=True, help="Prompts, in tokens.")
@click.option("--batches", multiple=True, default=("1,4,8",), show_default=True, help="Requests of a decode step.")
@click.option("--contexts", multiple=True, default=("128,1k",), show_default=True, help="The prompts they had.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Of every measurement.")
@click.option("--chunk", default="512", show_default=True, help="The workers' token budget of a step, as they were started.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens of a KV block, likewise.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Requests that a worker runs, likewise.")
@click.option("--gpu", "gpu_name", help="What shares refer to; default: the fitted rates become the nominal ones.")
@click.option("--link", "link_name", help="The same of transfers.")
@click.option("--catalogue", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own YAML.")
@click.option("--compare", "trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Replay this trace too.")
@click.option("--load", default=1.0, show_default=True, help="Replay so many times as fast.")
@click.option("--limit", type=click.IntRange(1), help="At most so many of its requests.")
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Live replays, for the run-to-run spread.")
@click.option("--out", default="shoal-profile.yaml", show_default=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Residuals as an SVG.")
@click.option("--format", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@reports_errors
def calibrate(server: Server, out: Path, plot: Path | None, output: str, **flags: Any) -> None:
    """Measure one prefill and one decode worker through the router, fit a profile, and write it for the planning commands.

    With --compare, a trace is replayed live and simulated with that profile; the exit status is 1 when a percentile is off
    by more than its tolerance (10 %, or twice the spread of the runs).

    \b
    shoal calibrate --address 127.0.0.1:50051 --out mine.yaml --plot residuals.svg
    shoal simulate --model smollm2-135m --profile mine.yaml --prefill 1 --decode 1 --rate 0.5/s --chunk 512
    """
    names = catalogues(flags["catalogue"])
    plan = plan_of(names, flags)
    own = ServeConfig()
    if not server.address:
        own = own_config(flags, plan)
        plan = replace(plan, model=spec_of(check(own)))
    elif flags["model_name"]:
        plan = replace(plan, model=names.model(flags["model_name"]))
    stamp = datetime.now(UTC).strftime("%Y-%m-%d")
    source = f"shoal calibrate, {stamp}, {server.address or 'a cluster started for it'}"
    result = asyncio.run(_run(server, own, plan, names, out.stem, source))
    fitted = result.fitted
    rows = residuals(result.measured, fitted.machine, fitted.wire)
    setup = {"model": result.measured.model.name, "dtype": result.dtype, "chunk": plan.token_budget, "batch": plan.max_running}
    write_profile(out, fitted, setup)
    if plot is not None:
        plot.write_text(residual_svg(rows, f"{result.measured.model.name}: predicted over measured"), encoding="utf-8")
    _print(result, rows, out, output)
    if result.comparison is not None and not all(verdict.is_met for verdict in result.comparison.verdicts):
        sys.exit(1)


def own_config(flags: dict[str, Any], plan: Plan) -> ServeConfig:
    """The cluster that is started where no address is given: `full`, and depths of two thirds and three quarters."""
    model = flags["model_name"] or DEFAULT_MODEL
    num_layers = open_model(model).config.shape.num_layers
    depths = (f"speed:{max(1, num_layers * 3 // 4)}", f"pop:{max(1, num_layers * 2 // 3)}")
    return ServeConfig(
        model=model,
        dtype=flags["dtype"],
        visibilities=tuple(split_list(flags["texts"])) or ("full", *depths),
        listen="127.0.0.1:0",
        block_size=plan.block_size,
        token_budget=plan.token_budget,
        max_requests=plan.max_running,
        local_prefill_tokens=0,  # what is measured as prefill must run there
        log_level="warning",
    )


def plan_of(names: Catalogues, flags: dict[str, Any]) -> Plan:
    """Check the flags. Raises InvalidConfig, NotFound or InvalidRequest with words."""
    lengths, contexts = (tuple(parse_tokens(text) for text in split_list(flags[name])) for name in ("lengths", "contexts"))
    batches = split_list(flags["batches"])
    if not all(text.isdigit() for text in batches):
        raise InvalidConfig(f"--batches {','.join(batches)} should be numbers of requests")
    texts = split_list(flags["texts"])

    def programme(num_layers: int, allowed: tuple[Visibility, ...]) -> Programme:
        shown = tuple(Visibility.parse(text).resolve(num_layers) for text in texts) or allowed
        return Programme(shown, lengths, tuple(map(int, batches)), contexts, flags["repeats"])

    programme(1 << 20, (Visibility(boundary_tokens=1),))  # raises before anything is started
    requests: tuple[SimRequest, ...] = ()
    if flags["trace"] is not None:
        notes = TraceNotes()
        source = limited(scaled(read_trace(flags["trace"], notes), flags["load"]), num_requests=flags["limit"], duration_s=None)
        requests = tuple(source)
        tell_notes(notes)
    return Plan(
        programme,
        parse_tokens(flags["chunk"]),
        flags["block_size"],
        flags["batch"],
        names.gpu(flags["gpu_name"]) if flags["gpu_name"] else None,
        names.link(flags["link_name"]) if flags["link_name"] else None,
        None,
        requests,
        flags["runs"],
    )


async def _run(server: Server, own: ServeConfig, plan: Plan, names: Catalogues, name: str, source: str) -> Result:
    with progress_bar() as told:
        async with workers(server, own, Console(stderr=True)) as client:
            return await run(client, plan, names, name, source, told)


def _print(result: Result, rows: Sequence[Residual], out: Path, output: str) -> None:
    fitted, comparison = result.fitted, result.comparison
    warnings = [*fitted.notes, *notes_on_noise([(f"{row.what}, {row.inputs}", row.spread) for row in rows], _NOISE)]
    compared = [
        _Compared(each.what, each.live_ms, spread, each.simulated_ms, each.error, each.tolerance, each.is_met)
        for each in (comparison.verdicts if comparison else ())
        for spread in [each.live_spread if comparison and len(comparison.runs) > 1 else None]
    ]
    if output == "json":
        document = {
            "profile": asdict(fitted.profile),
            "gpu": asdict(fitted.gpu),
            "link": asdict(fitted.link),
            "residuals": [asdict(row) | {"error": row.error} for row in rows],
            "compared": [asdict(row) for row in compared],
            "warnings": warnings,
        }
        click.echo(json.dumps(document, indent=1))
        return
    console = Console(width=160)
    table = [_Row(row.what, row.inputs, row.measured_ms, row.predicted_ms, row.error, row.spread) for row in rows]
    console.print(to_table(table, "Residuals", _HEADINGS))
    if compared:
        console.print(
            to_table(compared, f"Live and simulated, {len(comparison.requests) if comparison else 0} requests", _COMPARED)
        )
    for warning in warnings:
        click.echo(f"warning: {warning}")
    click.echo(f"wrote {out}: {describe(fitted)}")


def describe(fitted: Fit) -> str:
    """The fitted rates in words."""
    machine, profile, memory = fitted.machine, fitted.profile, fitted.gpu.memory_bytes_per_s
    parts = [
        f"linear layers {fitted.gpu.flops * profile.gemm / 1e9:,.0f} GFLOP/s (half at {profile.num_half_tokens:.0f} tokens)",
        f"attention {machine.attention_flops_per_s / 1e9:,.0f} GFLOP/s",
        f"weights {memory * profile.weight_read / 1e9:.1f} GB/s",
        f"KV {memory * profile.kv_read / 1e9:.1f} GB/s",
        f"{1e3 * profile.step_s:.2f} ms a step",
        f"{1e3 * profile.row_s:.2f} ms a row",
        f"{1e3 * profile.request_s:.1f} ms a request",
        f"hand-off {1e3 * profile.handoff_s:.1f} ms",
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    calibrate()
