"""Runs a load under each visibility, on the service that is given or on a cluster of its own. Knows processes; prints nothing."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks.load.asks import plan
from benchmarks.load.loops import Caller, Run, closed_loop, open_loop
from benchmarks.load.options import Options, visibilities_of
from benchmarks.pinned_cluster import pinned_cluster, workers
from shoal.cli.server_options import Server
from shoal.client import AsyncClient, Retry
from shoal.config.disaggregation import LOCAL_PREFILL_TOKENS
from shoal.errors import CapacityExceeded
from shoal.model_files import open_model
from shoal.simulator.calibration.measure import Told, ask
from shoal.visibility import Visibility

_WARM_UP_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Own:
    """The cluster that is started where no service is given."""

    model: str
    dtype: str


async def run(server: Server | None, own: Own, options: Options, told: Told) -> tuple[dict[str, list[Run]], list[str]]:
    """(One run a round by visibility, what is to be known of them). No round finds the tokens of the last one cached."""
    total = len(options.requests)
    told("starting", 0, total)
    async with _service(server, own, options) as (client, where):
        info = await client.model_info()
        texts = visibilities_of(options.visibilities, info.num_layers)
        asks, clipped = plan(options.requests, options.fit(info.max_context_length))
        runs: dict[str, list[Run]] = {text: [] for text in texts}
        num_done, total = 0, options.rounds * len(texts) * len(asks)

        def done(text: str) -> None:
            nonlocal num_done
            num_done += 1
            told(text, num_done, total)

        for turn in range(options.rounds):
            prompts = [one.token_ids(f"{options.seed}/{turn}", info.vocab_size) for one in asks]
            for text in texts:
                visibility = Visibility.parse(text).resolve(info.num_layers, 1)
                await _warm_up(client, visibility)
                caller = Caller(client, visibility, text, prompts, options.timeout_s, done)
                if options.num_callers is None:
                    runs[text].append(await open_loop(caller, asks))
                else:
                    runs[text].append(await closed_loop(caller, asks, options.num_callers, options.duration_s))
    return runs, [where, *filter(None, [clipped.words()])]


@asynccontextmanager
async def _service(server: Server | None, own: Own, options: Options) -> AsyncIterator[tuple[AsyncClient, str]]:
    """A client that never retries, of the given router or of a cluster started for this; and which of them."""
    once = Retry(attempts=1)
    if server is not None and server.address:
        async with server.connect_async(once) as client:
            yield client, f"the service at {server.address}"
        return
    cpus = sorted(os.sched_getaffinity(0))
    half = (len(cpus) + 1) // 2
    ours, theirs = cpus[:half], cpus[half:] or cpus
    num_layers = open_model(own.model).config.shape.num_layers
    texts = visibilities_of(options.visibilities, num_layers)
    for text in texts:
        Visibility.parse(text).resolve(num_layers, 1)  # raises before anything is started
    prefill, decode = workers(own.model, own.dtype, texts, num_threads=min(len(ours), len(theirs)))
    more = ("--local-prefill-tokens", str(LOCAL_PREFILL_TOKENS))
    cluster = pinned_cluster(
        prefill, decode, prefill_cpus=ours, decode_cpus=theirs, router_cpus=cpus, router_arguments=more
    )  # fmt: skip
    async with cluster as address, AsyncClient(address, retry=once) as client:
        yield client, f"{own.model}, {own.dtype}, prefill on cores {ours}, decode on {theirs}, router and callers on all"


async def _warm_up(client: AsyncClient, visibility: Visibility) -> None:
    """One prompt prefilled on either worker, of tokens that the load does not use. Waits for room that the last load took."""
    for length in (16, LOCAL_PREFILL_TOKENS + 64):
        for num_left in reversed(range(_WARM_UP_TRIES)):
            try:
                await ask(client, [7] * length, 4, visibility)
                break
            except CapacityExceeded:
                if not num_left:
                    raise
                await asyncio.sleep(1.0)
