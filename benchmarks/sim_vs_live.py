"""Calibrates on this machine, replays one trace live and simulates it: TTFT and TPOT beside each other.

`python -m benchmarks.sim_vs_live`. One prefill and one decode worker, each held to a core of its own (`--prefill-cpus`,
`--decode-cpus`); router and client take what is left. The trace is drawn from a seed, with the shape of a chat service
(log-normal lengths, Poisson arrivals) and a rate that keeps prefill busy for `--utilisation` of the
time; `--trace FILE` replays another.
Prints Markdown, writes a picture and the profile. Exit status 1 when a percentile is off by more than 10 %, or twice the spread
of the live runs.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from benchmarks.pinned_cluster import pinned_cluster, workers
from shoal.client import AsyncClient
from shoal.simulator.calibration.compare import Comparison, Setup, compare
from shoal.simulator.calibration.fit import Fit, fit, notes_on_noise
from shoal.simulator.calibration.measure import Programme, measure
from shoal.simulator.calibration.points import Measured, Residual, residuals
from shoal.simulator.calibration.profile_file import write_profile
from shoal.simulator.calibration.replay import LiveRun, replay
from shoal.simulator.calibration.scatter import residual_svg
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.step_cost import StepCost
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest, limited
from shoal.simulator.workload.trace_files import TraceNotes, read_trace
from shoal.visibility import Visibility

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def trace(options: argparse.Namespace, measured: Measured, fitted: Fit) -> list[SimRequest]:
    """The given trace, or one drawn at the rate that the fitted prefill worker can bear."""
    if options.trace:
        return list(limited(read_trace(Path(options.trace), TraceNotes()), num_requests=options.requests, duration_s=None))
    prompt, output = Lengths(options.prompt, 0.8, 1500), Lengths(options.output, 0.8, 200)
    shown, chunk = measured.prefill[0].visibility, measured.token_budget
    cost = StepCost(measured.model, fitted.machine, shown)
    sample = list(drawn(Arrivals(1.0), prompt, output, options.requests, options.seed))
    busy = sum(cost.prefill_s(shown.split(each.num_prompt_tokens).num_prefill_tokens, chunk_tokens=chunk) for each in sample)
    return list(drawn(Arrivals(options.utilisation * len(sample) / busy), prompt, output, options.requests, options.seed))


async def live(options: argparse.Namespace) -> tuple[Measured, Fit, Comparison]:
    """Everything that needs the workers."""
    texts = options.visibilities.split(",")
    prefill, decode = workers(options.model, options.dtype, texts, token_budget=options.chunk)
    model = Catalogues.shipped().model(options.model)
    size = 4.0 if options.dtype == "float32" else 2.0
    model = model.with_precision(weight_bytes=size, kv_bytes=size, hidden_bytes=size)
    shown = tuple(Visibility.parse(text).resolve(model.shape.num_layers) for text in texts)
    cpus = [{int(cpu) for cpu in text.split(",")} for text in (options.prefill_cpus, options.decode_cpus, options.router_cpus)]
    cluster = pinned_cluster(prefill, decode, prefill_cpus=cpus[0], decode_cpus=cpus[1], router_cpus=cpus[2])
    async with cluster as address, AsyncClient(address) as client:
        programme = Programme(shown, (64, 256, 512, 1024), (1, 2, 4, 8), (128, 512), options.repeats)
        vocab = model.shape.vocab_size
        measured = await measure(client, model, vocab, programme, token_budget=options.chunk, told=say)
        loads = {load.pool: load for load in await client.loads()}
        memory = model.num_parameters * size + loads["decode"].num_total_blocks * decode.block_size * model.kv_token_bytes
        fitted = fit(measured, name="this-machine", source="benchmarks.sim_vs_live", gpu=None, link=None, memory_bytes=memory)
        requests = trace(options, measured, fitted)
        runs: list[LiveRun] = []
        for index in range(options.runs):
            say(f"replay {index + 1} of {options.runs}: {len(requests)} requests over {requests[-1].arrival_s:.0f} s")
            runs.append(await replay(client, requests, shown[0], vocab, index, lambda num_done: None))
    setup = Setup(model, shown[0], options.chunk, decode.max_running_requests, decode.block_size)
    return measured, fitted, compare(setup, fitted, requests, runs)


def quantile_rows(comparison: Comparison) -> list[Residual]:
    """Quantiles of the replays as points of the picture: the runs' mean, and how far they lie apart."""
    rows = []
    tpot = [[value for value in run.tpot_s if value is not None] for run in comparison.runs]
    sides = (("TTFT, replay", [list(run.ttft_s) for run in comparison.runs], comparison.simulated.ttft_curve_s),
             ("TPOT, replay", tpot, comparison.simulated.tpot_curve_s))  # fmt: skip
    for what, lives, curve in sides:
        for share in SHARES:
            values = sorted(sorted(live)[round(share * (len(live) - 1))] for live in lives)
            middle = values[len(values) // 2]
            spread = (values[-1] - values[0]) / middle
            rows.append(Residual(what, f"{100 * share:g}%", 1e3 * middle, 1e3 * curve[round(share * (len(curve) - 1))], spread))
    return rows


def report(measured: Measured, comparison: Comparison, rows: list[Residual]) -> str:
    """Tables of Markdown."""
    lines = [
        "| what | points | median error | median of absolute errors | largest | repeats differ by (median) |",
        "|---|" + "---|" * 5,
    ]
    for kind in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == kind]
        errors, spreads = sorted(row.error for row in mine), sorted(row.spread or 0.0 for row in mine)
        absolute = sorted(abs(error) for error in errors)
        figures = (errors[len(errors) // 2], absolute[len(absolute) // 2], max(errors, key=abs), spreads[len(spreads) // 2])
        lines.append(f"| {kind} | {len(mine)} | " + " | ".join(f"{100 * figure:+.1f}%" for figure in figures) + " |")
    requests = comparison.requests
    prompts, outputs = (
        sum(getattr(r, name) for r in requests) / len(requests) for name in ("num_prompt_tokens", "num_output_tokens")
    )
    late = max(run.lateness_s for run in comparison.runs)
    lines += [
        "",
        f"{len(requests)} requests over {requests[-1].arrival_s:.0f} s, in the mean {prompts:.0f} prompt and {outputs:.0f} "
        f"output tokens; {len(comparison.runs)} live runs, requests sent at most {1e3 * late:.0f} ms late; on the wire "
        f"{comparison.simulated.wire_bytes:,.0f} bytes simulated, {comparison.runs[0].wire_bytes:,} live",
        "",
        "| | live (median of runs) | runs differ by | simulated | error | tolerance | |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in comparison.verdicts:
        verdict = "within" if each.is_met else "**off**"
        lines.append(
            f"| {each.what} | {each.live_ms:.1f} ms | {100 * each.live_spread:.1f}% | {each.simulated_ms:.1f} ms | "
            f"{100 * each.error:+.1f}% | {100 * each.tolerance:.0f}% | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--visibilities", default="full,speed:22", help="all are measured, the first is replayed")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--prefill-cpus", default="0")
    parser.add_argument("--decode-cpus", default="1")
    parser.add_argument("--router-cpus", default="0,1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", help="instead of a drawn one")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt", type=float, default=300)
    parser.add_argument("--output", type=float, default=40)
    parser.add_argument("--utilisation", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", default="this-machine.yaml", help="where the fitted profile is written")
    parser.add_argument("--plot", default="residuals.svg")
    options = parser.parse_args()
    measured, fitted, comparison = asyncio.run(live(options))
    rows = residuals(measured, fitted.machine, fitted.wire)
    write_profile(Path(options.profile), fitted, {"model": options.model, "dtype": options.dtype, "chunk": options.chunk})
    shown = [*rows, *quantile_rows(comparison)]
    Path(options.plot).write_text(residual_svg(shown, f"{options.model}: predicted over measured"), encoding="utf-8")
    for row in rows:
        figures = f"{row.measured_ms:9.2f} {row.predicted_ms:9.2f} {100 * row.error:+6.1f}% ±{50 * (row.spread or 0.0):.0f}%"
        say(f"{row.what:24} {row.inputs:38} {figures}")
    for crowd in measured.crowd:
        ms = [
            f"{1e3 * each.middle:.1f}"
            for each in (crowd.step_alone, crowd.step_beside, crowd.prefill_alone, crowd.prefill_beside)
        ]
        words = f"step {ms[0]} ms alone, {ms[1]} beside prefill; prompt {ms[2]} ms alone, {ms[3]} beside decode"
        say(f"prompts of {crowd.num_prompt_tokens} every {1e3 * crowd.interval_s:.0f} ms: {words}")
    say(fitted.profile, fitted.link)
    for note in [*fitted.notes, *notes_on_noise([(f"{row.what}, {row.inputs}", row.spread) for row in rows], 0.15)]:
        say("warning:", note)
    print(report(measured, comparison, rows))
    sys.exit(0 if all(each.is_met for each in comparison.verdicts) else 1)


if __name__ == "__main__":
    main()
