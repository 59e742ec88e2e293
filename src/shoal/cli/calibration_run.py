"""What `shoal calibrate` does between its flags and its tables: find or start workers, measure, fit, replay. Prints nothing."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console

from shoal.cli.own_cluster import own_cluster
from shoal.cli.server_options import Server
from shoal.client import AsyncClient
from shoal.config.serve import ServeConfig
from shoal.errors import InvalidConfig, NotFound
from shoal.model_files import ModelFiles
from shoal.simulator.calibration.compare import Comparison, Setup, compare
from shoal.simulator.calibration.fit import Fit, fit
from shoal.simulator.calibration.measure import Programme, Told, measure
from shoal.simulator.calibration.points import Measured
from shoal.simulator.calibration.replay import LiveRun, replay
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.hardware import Gpu, Link
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility

_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and what the workers' settings are that no call tells."""

    programme: Callable[[int, tuple[Visibility, ...]], Programme]  # given the layers and all allowed visibilities
    token_budget: int
    block_size: int
    max_running: int
    gpu: Gpu | None
    link: Link | None
    model: ModelSpec | None  # None: by the server's name
    requests: Sequence[SimRequest] = ()  # to be replayed
    num_runs: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    measured: Measured
    fitted: Fit
    setup: Setup
    dtype: str
    comparison: Comparison | None


@asynccontextmanager
async def workers(server: Server, own: ServeConfig, console: Console) -> AsyncIterator[AsyncClient]:
    """A client of the given router, or of a cluster started for this, with one worker of each pool."""
    if server.address:
        async with server.connect_async() as client:
            yield client
        return
    async with own_cluster(own, console) as address, AsyncClient(address) as client:
        yield client


async def run(client: AsyncClient, plan: Plan, names: Catalogues, name: str, source: str, told: Told) -> Result:
    """Measure, fit, and replay what there is to replay.

    Raises Unavailable when nobody answers, InvalidConfig when there is not exactly one worker in each pool.
    """
    info = await client.model_info()
    loads = await client.loads()
    pools = {pool: [load for load in loads if load.pool == pool] for pool in ("prefill", "decode")}
    if any(len(found) != 1 for found in pools.values()):
        counts = " and ".join(f"{len(found)} {pool}" for pool, found in pools.items())
        raise InvalidConfig(f"calibrate against one prefill and one decode worker; the server has {counts}")
    model = _served(plan.model, names, info)
    allowed = tuple(Visibility.parse(text).resolve(model.shape.num_layers) for text in info.allowed_visibilities)
    programme = plan.programme(model.shape.num_layers, allowed)
    measured = await measure(client, model, info.vocab_size, programme, token_budget=plan.token_budget, told=told)
    weights = model.num_parameters * model.weight_bytes
    memory = weights + pools["decode"][0].num_total_blocks * plan.block_size * model.kv_token_bytes
    fitted = fit(measured, name=name, source=source, gpu=plan.gpu, link=plan.link, memory_bytes=memory)
    setup = Setup(model, programme.visibilities[0], plan.token_budget, plan.max_running, plan.block_size)
    comparison = None
    if plan.requests:
        runs = await replays(client, plan, programme.visibilities[0], info.vocab_size, told)
        comparison = compare(setup, fitted, plan.requests, runs)
    return Result(measured, fitted, setup, info.dtype, comparison)


def spec_of(files: ModelFiles) -> ModelSpec:
    """A model by its own files, whether a catalogue knows it or not."""
    config = files.config
    return ModelSpec(files.name, config.shape, str(files.path), tied_embeddings=config.tied_embeddings)


async def replays(client: AsyncClient, plan: Plan, visibility: Visibility, vocab_size: int, told: Told) -> list[LiveRun]:
    """The same requests `num_runs` times, with other tokens."""
    runs, total = [], len(plan.requests)
    for index in range(plan.num_runs):
        words = f"replay {index + 1} of {plan.num_runs}"
        runs.append(await replay(client, plan.requests, visibility, vocab_size, index, partial(_of, told, words, total)))
    return runs


def _of(told: Told, words: str, total: int, num_done: int) -> None:
    told(words, num_done, total)


def _served(given: ModelSpec | None, names: Catalogues, info: Any) -> ModelSpec:
    """The served model at its precision. Raises InvalidConfig when the given one cannot be it."""
    name = info.served_model_name
    try:
        spec = given or names.model(name)
    except NotFound as error:
        raise InvalidConfig(f"the server calls its model {name!r}, which no catalogue knows; give --model config.json") from error
    if (spec.shape.num_layers, spec.shape.vocab_size) != (info.num_layers, info.vocab_size):
        raise InvalidConfig(
            f"{spec.name} has {spec.shape.num_layers} layers and {spec.shape.vocab_size:,} tokens, the served {name} "
            f"{info.num_layers} and {info.vocab_size:,}; give the right --model"
        )
    size = _BYTES.get(info.dtype, 2.0)
    return spec.with_precision(weight_bytes=size, kv_bytes=size, hidden_bytes=size)
