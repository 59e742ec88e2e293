"""Two Ray nodes in network namespaces, their link shaped by tc: the exposed transfer beside the simulator's prediction.

`python -m benchmarks.namespaces` needs root, `ip` and `tc` (iproute2); without them it says so and ends with status 0. It first
measures both workers and the unshaped link as `shoal calibrate` does, and fits a profile to that; then every prompt is asked over
every link, in turns. What is predicted for a shaped link follows from that profile and the link's nominal rate alone.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.netns import CannotShape, Net, missing
from benchmarks.two_nodes import PLACES, two_nodes
from shoal.client import AsyncClient, Completion
from shoal.simulator.calibration.fit import Fit, fit
from shoal.simulator.calibration.measure import Programme, ask, measure
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.hardware import Link
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.request_cost import first_step_s
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire, handoff_cost
from shoal.simulator.units import parse_bandwidth
from shoal.visibility import Visibility

OPEN = "open"  # the link as it is between namespaces: this machine's memory
CHUNK = 512


@dataclass(slots=True)
class Cell:
    """One prompt under one visibility over one link, asked again and again; milliseconds."""

    ttft: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    payload_bytes: int = 0

    def add(self, done: Completion) -> None:
        self.ttft.append(done.timings.ttft_ms)
        self.prefill.append(done.timings.prefill_ms)
        self.exposed.append(done.timings.transfer_ms)
        self.payload_bytes = done.transfer.payload_bytes


@dataclass(frozen=True, slots=True)
class Trial:
    """What is asked."""

    links: tuple[str, ...]
    lengths: tuple[int, ...]
    visibilities: tuple[Visibility, ...]  # resolved
    repeats: int


def spec_of(name: str, dtype: str) -> ModelSpec:
    size = 4.0 if dtype == "float32" else 2.0
    return Catalogues.shipped().model(name).with_precision(weight_bytes=size, kv_bytes=size, hidden_bytes=size)


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


async def calibrate(client: AsyncClient, model: ModelSpec, trial: Trial) -> Fit:
    """A profile of both workers and of the open link between them."""
    lengths = tuple(sorted({128, *trial.lengths}))
    programme = Programme(trial.visibilities, lengths, (1, 2), (128, 512), max(2, trial.repeats // 2))
    measured = await measure(client, model, model.shape.vocab_size, programme, token_budget=CHUNK, told=say)
    return fit(measured, name="namespaces", source="benchmarks.namespaces", gpu=None, link=None, memory_bytes=4e9)


async def ask_all(client: AsyncClient, net: Net, trial: Trial, vocab: int) -> dict[tuple[str, int, Visibility], Cell]:
    """Every prompt over every link, links in turns; between prefill and decode both ways are shaped."""
    cells = {(link, n, v): Cell() for link in trial.links for n in trial.lengths for v in trial.visibilities}
    rng = random.Random()
    for repeat in range(trial.repeats):
        for link in trial.links:
            for place in ("prefill", "decode"):
                net.shape(place, None if link == OPEN else 8 * parse_bandwidth(link))
            for length in trial.lengths:
                for visibility in trial.visibilities:
                    prompt = [rng.randrange(vocab) for _ in range(length)]
                    done = (await ask(client, prompt, 1, visibility)).completion
                    assert done is not None and done.transfer.payload_bytes == done.transfer.plan_bytes, (
                        "bytes crossed that no plan has"
                    )
                    cells[link, length, visibility].add(done)
        say(f"round {repeat + 1} of {trial.repeats}; load average {os.getloadavg()[0]:.1f}")
    return cells


def predicted_ms(model: ModelSpec, fitted: Fit, link: str, length: int, visibility: Visibility) -> tuple[float, float]:
    """(Exposed transfer, TTFT) of a prompt over a link of this nominal rate, by the fitted workers."""
    cost, wire = StepCost(model, fitted.machine, visibility), fitted.wire
    if link != OPEN:
        rate = min(parse_bandwidth(link), wire.bytes_per_s)
        wire = Wire(Link(link, rate, wire.link.latency_s, "tc"), 1, 1.0, wire.handoff_s, wire.message_s)
    handoff = handoff_cost(cost, wire, length, chunk_tokens=CHUNK)
    ttft = handoff.prefill_s + handoff.exposed_s + first_step_s(cost, length) + fitted.profile.request_s
    return 1e3 * handoff.exposed_s, 1e3 * ttft


def table(model: ModelSpec, fitted: Fit, cells: dict[tuple[str, int, Visibility], Cell]) -> str:
    """Markdown."""
    lines = [
        "| link | prompt | visibility | crossed | prefill | exposed transfer | predicted | TTFT | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (link, length, visibility), cell in cells.items():
        exposed, ttft = predicted_ms(model, fitted, link, length, visibility)
        figures = (
            f"{cell.payload_bytes / 1e6:.1f} MB",
            f"{statistics.median(cell.prefill):.0f} ms",
            *(f"{_spread(cell.exposed)} ms", f"{exposed:.0f} ms"),
            *(f"{_spread(cell.ttft)} ms", f"{ttft:.0f} ms"),
        )
        lines.append(f"| {link} | {length:,} | `{visibility.policy}` | {' | '.join(figures)} |")
    return "\n".join(lines)


def byte_table(net_bytes: dict[str, tuple[int, int]], payload: int) -> str:
    """Where bytes went: what each namespace's interface carried, headers included, beside the payload counted at the channel."""
    lines = ["| namespace | sent | received |", "|---|---|---|"]
    lines += [f"| {place} | {sent / 1e6:.1f} MB | {received / 1e6:.1f} MB |" for place, (sent, received) in net_bytes.items()]
    return "\n".join([*lines, "", f"Payload of all transfers, counted at the channel: {payload / 1e6:.1f} MB."])


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


async def trial_run(net: Net, options: argparse.Namespace, log: Path) -> str:
    """Everything; the report."""
    model = spec_of(options.model, options.dtype)
    shown = tuple(Visibility.parse(text).resolve(model.shape.num_layers, 1) for text in options.visibilities.split(","))
    trial = Trial((OPEN, *options.links.split(",")), tuple(map(int, options.lengths.split(","))), shown, options.repeats)
    changes: dict[str, Any] = {"dtype": options.dtype, "token_budget": CHUNK, "prefix_cache": False, "local_prefill_tokens": 0}
    if options.entry_tokens:
        changes["transfer"] = {"max_entry_tokens": options.entry_tokens}
    cpus = {"prefill_cpus": "0", "decode_cpus": "1"} if options.pin else {}
    texts = options.visibilities.split(",")
    async with two_nodes(net, options.model, texts, log, **changes, **cpus) as address, AsyncClient(address) as client:
        fitted = await calibrate(client, model, trial)
        before = {place: net.bytes_moved(place) for place in PLACES}
        cells = await ask_all(client, net, trial, model.shape.vocab_size)
        moved = {
            place: tuple(now - then for now, then in zip(net.bytes_moved(place), before[place], strict=True)) for place in PLACES
        }
    payload = sum(cell.payload_bytes * len(cell.ttft) for cell in cells.values())
    open_rate = fitted.wire.bytes_per_s * 8 / 1e9
    head = (
        f"{options.model}, {options.dtype}, prefill chunks of {CHUNK}, median (least–most) of {trial.repeats} rounds, links in "
        "turns; "
        f"the open link's rate as fitted {open_rate:.1f} Gb/s, hand-off {1e3 * fitted.wire.handoff_s:.1f} ms; "
        f"load average at the end {os.getloadavg()[0]:.1f}"
    )
    return "\n\n".join([head, table(model, fitted, cells), byte_table(moved, payload), *fitted.notes])  # type: ignore[arg-type]


async def check_run(net: Net, options: argparse.Namespace, log: Path) -> str:
    """One request across the nodes, prefilled in several chunks, as JSON: for a test."""
    texts = options.visibilities.split(",")
    async with (
        two_nodes(net, options.model, texts, log, dtype=options.dtype, token_budget=16) as address,
        AsyncClient(address) as client,
    ):
        net.shape("prefill", 1e9)
        prompt = [7 + 3 * at % 90 for at in range(int(options.lengths))]
        done = (await ask(client, prompt, 8, Visibility.parse(texts[-1]))).completion
        assert done is not None
        info = await client.server_info()
        placed = {worker.worker_id: worker.address for worker in info.workers}
        sent, _ = net.bytes_moved("prefill")
    return json.dumps(
        {
            "prompt": prompt, "visibility": done.visibility, "tokens": list(done.token_ids), "placed": placed, "sent": sent,
            "payload_bytes": done.transfer.payload_bytes, "plan_bytes": done.transfer.plan_bytes,
            "prefill_at": done.transfer.prefill_at, "addresses": net.addresses,
        }
    )  # fmt: skip


def main() -> None:
    """Parse, make the network, run, take it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--visibilities", default="full,speed:22,pop:20")
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--links", default="100Mb/s,1gbe,10gbe", help="rates for tc, beside the link as it is")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--entry-tokens", type=int, help="tokens of one message at most; default: as `shoal serve`")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="prefill on CPU 0, decode on CPU 1")
    parser.add_argument("--check", action="store_true", help="one request only, as JSON")
    parser.add_argument("--log", type=Path, default=Path("namespaces.log"), help="what the processes say")
    options = parser.parse_args()
    if why := missing():
        print(f"skipped: {why}")
        return
    net = Net(PLACES)
    try:
        net.make()
        net.enter("router")  # before any other thread runs
        print(asyncio.run((check_run if options.check else trial_run)(net, options, options.log)))
    except CannotShape as error:
        print(f"skipped: {error}")
    finally:
        net.remove()


if __name__ == "__main__":
    main()
