"""Simulated and live on the same requests: equal bytes, chunks and workers, also when a rule of placement/ is another."""

import asyncio
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.calibration_run import Plan, run
from shoal.client import AsyncClient
from shoal.config.worker import Pool
from shoal.model_files import open_model
from shoal.model_files.random_model import write_random_model
from shoal.placement import balance
from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.simulator.calibration.measure import Programme
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec
from shoal.simulator.hardware import Gpu
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.profiles import PROFILES
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, Ask, generate, in_process, make_config
from tests.e2e.served import ask, served
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import NUM_LAYERS, until

NAMES = Catalogues.shipped()
SLOW = Machine(
    Gpu("slow", 1e9, 1e9, 1e9, 1e9, 1e9, None, "made up"), PROFILES["ideal"]
)  # steps last long: all arrive in the first


def spec_of(model: Path, visibility: str, *, prefill: int = 1, decode: int = 1, token_budget: int = 64) -> ClusterSpec:
    shape = open_model(str(model)).config.shape
    served_model = ModelSpec("tiny", shape, "test", weight_bytes=4.0, kv_bytes=4.0, hidden_bytes=4.0)
    pools = [(PoolSpec(SLOW, count, token_budget, 64),) for count in (decode, prefill)]
    shown = Visibility.parse(visibility).resolve(shape.num_layers)
    return ClusterSpec(served_model, shown, pools[0], pools[1], NAMES.link("100gbe"), block_size=8)


async def test_simulated_bytes_equal_the_counters_of_the_live_workers(tiny_model: Path) -> None:
    lengths = (1, 2, 9, 40, 130)
    async with served(tiny_model, token_budget=64, prefix_cache=False) as live:
        for visibility in MIXED:
            done = [(await live.completes(ask([7] * length, visibility, max_tokens=3)))[0] for length in lengths]
            requests = [SimRequest(float(index), length, 3) for index, length in enumerate(lengths)]
            outcome = simulate(spec_of(tiny_model, visibility), iter(requests))
            assert outcome.wire_bytes == sum(each.transfer.payload_bytes for each in done) > 0, visibility


@dataclass
class Tape:
    """Every step that any Batcher chose, requests numbered in the order in which they came to it."""

    steps: dict[int, list[list[tuple[int, int, int]]]] = field(default_factory=dict)
    keys: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def of_prefill(self) -> list[list[tuple[int, int, int]]]:
        """The one that began a prompt."""
        [found] = [steps for steps in self.steps.values() if steps and steps[0][0][1] == 0]
        return found


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Tape]]:
    current = Tape()
    next_step, add = Batcher.next_step, Batcher.add

    def taped_step(self: Batcher, token_budget: int, max_requests: int) -> tuple[Chunk, ...]:
        chunks = next_step(self, token_budget, max_requests)
        if chunks:
            names = current.keys[id(self)]
            current.steps.setdefault(id(self), []).append([(names[chunk.key], chunk.start, chunk.stop) for chunk in chunks])
        return chunks

    def taped_add(self: Batcher, cursor: TokenCursor) -> None:
        names = current.keys.setdefault(id(self), {})
        names[cursor.key] = len(names)
        add(self, cursor)

    monkeypatch.setattr(Batcher, "next_step", taped_step)
    monkeypatch.setattr(Batcher, "add", taped_add)

    def new() -> Tape:
        nonlocal current
        current = Tape()
        return current

    yield new


PROMPTS = (150, 90, 20, 33, 70, 11)


async def live_chunks(model: Path) -> None:
    """All prompts are with the prefill worker before its first step is over."""
    loop, gate = asyncio.get_running_loop(), asyncio.Event()

    def layer_done(layer: int) -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)

    configs = (make_config(Pool.PREFILL, model, token_budget=64), make_config(Pool.DECODE, model, token_budget=64))
    async with in_process(*configs, layer_done=layer_done) as (prefill, _, source, sink):
        assert prefill._loaded is not None
        steps, answers = prefill._loaded.steps, []
        for index, length in enumerate(PROMPTS):
            answers.append(asyncio.create_task(generate(Ask(tuple([5] * length), "full", max_tokens=2), source, sink)))
            await until(lambda number=index: steps.num_running == number + 1, timeout_s=10)  # type: ignore[misc]
        gate.set()
        await asyncio.gather(*answers)


def simulated_chunks(model: Path) -> None:
    simulate(spec_of(model, "full"), (SimRequest(1e-9 * index, length, 2) for index, length in enumerate(PROMPTS)))


async def test_a_mutated_batching_rule_changes_live_and_simulated_steps_alike(
    tiny_model: Path, tape: Callable[[], Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        lived = tape()
        await live_chunks(tiny_model)
        simulated = tape()
        simulated_chunks(tiny_model)
        return lived.of_prefill, simulated.of_prefill

    live, simulated = await both()
    assert live == simulated and len(live) > 5
    cut = Batcher._cut_chunks
    monkeypatch.setattr(Batcher, "_cut_chunks", lambda self, waiting, *rest: cut(self, waiting[::-1], *rest)[::-1])
    mutated_live, mutated_simulated = await both()
    assert mutated_live == mutated_simulated != live


def workers_in_order(chosen: Sequence[str]) -> list[int]:
    """Names as numbers in the order of their first appearance: ties are broken at random on both sides."""
    names = list(dict.fromkeys(chosen))
    return [names.index(name) for name in chosen]


async def live_choices(requests: Sequence[SimRequest]) -> list[int]:
    """Which decode worker the router chose, while nobody answers."""
    chosen: list[str] = []
    async with Cluster(2, 3) as live:
        for worker in live.workers:
            worker.hang = True
        calls = []
        for index, each in enumerate(requests):
            prompt = request([7] * each.num_prompt_tokens, max_tokens=each.num_output_tokens, visibility="full")
            calls.append(asyncio.create_task(live.replies(prompt)))
            await until(lambda number=index: sum(len(worker.seen) for worker in live.decode) == number + 1)  # type: ignore[misc]
            [latest] = [w.worker_id for w in live.decode if len(w.seen) > chosen.count(w.worker_id)]
            chosen.append(latest)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return workers_in_order(chosen)


def simulated_choices(requests: Sequence[SimRequest], lines: Any) -> list[int]:
    model = NAMES.model("smollm2-135m")
    pools = [(PoolSpec(SLOW, count, 64, 64),) for count in (3, 2)]
    shown = Visibility().resolve(NUM_LAYERS)
    simulate(ClusterSpec(model, shown, pools[0], pools[1], NAMES.link("100gbe")), iter(requests), lines=lines)
    rows = sorted((row.split(",") for row in lines.getvalue().splitlines()[1:]), key=lambda row: int(row[0]))
    return workers_in_order([row[5] for row in rows])


async def test_a_mutated_choice_of_workers_changes_live_and_simulated_choices_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(10, 200), (10, 60), (10, 95), (10, 20), (10, 20), (10, 40), (10, 30), (10, 200), (10, 100), (10, 10)]
    requests = [SimRequest(1e-9 * index, prompt, output) for index, (prompt, output) in enumerate(sizes)]
    live = await live_choices(requests)
    assert live == simulated_choices(requests, io.StringIO()) and set(live) == {0, 1, 2}
    monkeypatch.setattr(
        balance, "_least_loaded", lambda views, rng: min(views, key=lambda view: (-view.outstanding_token_layers, view.worker_id))
    )
    mutated = await live_choices(requests)
    assert mutated == simulated_choices(requests, io.StringIO()) != live


async def test_calibrate_measures_real_workers_and_replays_a_trace(tmp_path: Path) -> None:
    # wide: time per token stands above what a step costs; whole: the number of chunks looks like a time per token
    sizes = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "intermediate_size": 768}
    wide = write_random_model(tmp_path / "wide", max_context=1024, **sizes)
    model = spec_of(wide, "full").model
    requests = [SimRequest(0.05 * index, 20, 4) for index in range(6)]
    told: list[str] = []
    async with served(wide, token_budget=1024) as live, AsyncClient(live.address) as client:
        plan = Plan(
            lambda _, allowed: Programme(allowed[:2], (16, 256, 900), (1, 2), (8, 64), 2, 8),
            1024, 8, 64, None, None, model, requests, 2,
        )  # fmt: skip
        result = await run(client, plan, NAMES, "wide", "test", lambda what, done, total: told.append(what))
    assert len(result.measured.prefill) == 6 and len(result.measured.decode) == 4
    assert result.comparison is not None and len(result.comparison.runs) == 2
    assert result.comparison.simulated.wire_bytes == result.comparison.runs[0].wire_bytes  # the same requests, the same bytes
    assert {"TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"} == {verdict.what for verdict in result.comparison.verdicts}
    assert told[0] == "warming up" and told[-1] == "replay 2 of 2"
