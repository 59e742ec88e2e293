"""`python -m tests.chaos.soak`: steady mixed load with callers that leave, for long; nothing may grow, or it ends with 1."""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import grpc
from rich.console import Console
from rich.table import Table

from shoal.model_files import write_random_model
from tests.chaos.cluster import Ident, Victims, running
from tests.chaos.driver import Driver
from tests.chaos.plan import Mix, Plan, make_plan
from tests.chaos.plot import lines_svg
from tests.chaos.reference import Reference
from tests.chaos.run import FOUR_LAYERS, until_idle
from tests.chaos.samples import Holdings, Sample, holdings, take
from tests.chaos.verdict import Verdict, judge
from tests.e2e.conftest import Cluster

SAMPLE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Soaked:
    """All that a soak showed."""

    samples: Mapping[str, Sequence[Sample]]
    restarted: tuple[str, ...]
    verdict: Verdict
    idle_after_s: float | None

    @property
    def processes(self) -> list[Holdings]:
        return [holdings(name, samples) for name, samples in self.samples.items() if len(samples) > 2]


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True)
@click.option("--rate", type=float, default=3.0, show_default=True, help="Requests a second.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every sample there.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Draw memory over time there.")
def main(minutes: float, rate: float, seed: int, json_path: Path | None, svg_path: Path | None) -> None:
    """Load a cluster of two prefill and two decode workers for long, and see that no process grows."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as scratch:
        folder = Path(scratch)
        model = str(write_random_model(folder / "model", max_context=1024))
        plan = make_plan(Mix(512, FOUR_LAYERS, (1, 400), (1, 120), 400, rate, 48, 2.0), max(1, int(60 * minutes * rate)), seed)
        reference = Reference(model)
        reference.answer_all(plan.questions)
        arguments = ["--model", model, "--visibilities", ",".join(FOUR_LAYERS), "--kv-memory", "4MiB"]
        with running(arguments, folder, own=False, faults={}) as cluster:
            soaked = asyncio.run(_soak(cluster, plan, reference, console, 60 * minutes))
    faults = show(soaked, console)
    if svg_path is not None:
        svg_path.write_text(draw(soaked))
    if json_path is not None:
        samples = {name: [asdict(sample) for sample in own] for name, own in soaked.samples.items()}
        json_path.write_text(json.dumps({"counts": dict(soaked.verdict.counts), "faults": faults, "samples": samples}))
    sys.exit(1 if faults else 0)


async def _soak(cluster: Cluster, plan: Plan, reference: Reference, console: Console, limit_s: float) -> Soaked:
    victims = Victims(cluster)
    driver = Driver(victims.address, plan, "soak", 48)
    idents = await victims.idents()
    samples: dict[str, list[Sample]] = {name: [] for name in idents}
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(limit_s, stop.set)
    sampling = asyncio.create_task(_sample(victims, idents, samples, driver, console))
    await driver.run(lambda outcome: None, stop)
    timer.cancel()
    sampling.cancel()
    idle_after_s, held = await until_idle(victims)
    await _one(victims, idents, samples, time.monotonic())
    verdict = judge(driver.outcomes, plan.questions, reference.answers, reference.explains, ())
    if held:
        verdict.add("held", None, "; ".join(f"{name}: {what}" for name, what in held.items()))
    now = await victims.idents()
    restarted = tuple(sorted(name for name, ident in idents.items() if now.get(name) != ident))
    await driver.close()
    await victims.close()
    return Soaked(samples, restarted, verdict, idle_after_s)


async def _sample(
    victims: Victims, idents: Mapping[str, Ident], samples: dict[str, list[Sample]], driver: Driver, console: Console
) -> None:
    began, said_s = time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        await _one(victims, idents, samples, now)
        if now - began - said_s > 60 or now == began:
            said_s = now - began
            console.print(f"{said_s / 60:.0f} min, {len(driver.outcomes)} requests", highlight=False)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def _one(victims: Victims, idents: Mapping[str, Ident], samples: dict[str, list[Sample]], at_s: float) -> None:
    blocks: dict[str, int] = {}
    with contextlib.suppress(grpc.aio.AioRpcError):
        blocks = {name: load.num_used_blocks for name, load in (await victims.loads()).items()}
    for name, sample in (await asyncio.to_thread(take, idents, blocks, at_s)).items():
        samples[name].append(sample)


def show(soaked: Soaked, console: Console) -> list[str]:
    """The table; returns what must not be, in words."""
    heads = ("process", "memory, MB", "grows by", "file descriptors", "grow by", "threads", "grow by", "blocks at the end")
    table = Table(*heads, title="mean of the last two thirds, and what a straight line through them grows by")
    faults = [f"{name}: restarted" for name in soaked.restarted]
    for process in soaked.processes:
        rss, fds, threads = process.rss, process.fds, process.threads
        table.add_row(
            process.name,
            f"{rss.mean / 1e6:.1f}", f"{rss.growth / 1e6:+.2f}",
            f"{fds.mean:.1f}", f"{fds.growth:+.1f}",
            f"{threads.mean:.1f}", f"{threads.growth:+.1f}",
            "–" if process.blocks_at_end is None else str(process.blocks_at_end),
        )  # fmt: skip
        faults += [f"{process.name}: {fault}" for fault in process.faults]
    console.print(table)
    counts = soaked.verdict.counts
    console.print(", ".join(f"{name} {counts[name]}" for name in sorted(counts)), highlight=False)
    faults += [f"{violation.kind} {violation.request or ''}: {violation.detail}" for violation in soaked.verdict.violations]
    for fault in faults:
        console.print(fault, style="red", markup=False)
    console.print("[bold]flat" if not faults else f"[bold]{len(faults)} FAULTS")
    return faults


def draw(soaked: Soaked) -> str:
    """Memory of each process over time, as a share of its mean after settling."""
    series: dict[str, list[tuple[float, float]]] = {}
    for process in soaked.processes:
        own = soaked.samples[process.name]
        series[process.name] = [(sample.at_s - own[0].at_s, sample.rss_bytes / process.rss.mean) for sample in own]
    return lines_svg("resident memory, as a share of its mean over the last two thirds", series, low=0.9, high=1.1)


if __name__ == "__main__":
    main()
