"""Cuts the network between a prefill and a decode worker while KV crosses, and tells what each end did. `python partition_lab.py
FOLDER MODEL` makes network namespaces of its own, needs root and `ip`, and prints one JSON object.

Each process lives in a namespace; a fifth one in their midst forwards, and drops without a word what passes between two of them
while they are cut:

    driver, router ──┐        ┌── prefill-0
                     ├─ hub ──┤
         decode-1 ───┘        └── decode-0
"""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.netns import Net
from shoal.config.router import RouterConfig
from shoal.config.worker import Pool, WorkerConfig
from shoal.errors import ShoalError
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.app import Router
from shoal.rpc import open_channel
from shoal.visibility import Visibility
from tests.e2e.harness import (
    MIXED,
    TRANSFER,
    Ask,
    Endpoint,
    WorkerProcess,
    decode_request,
    generate,
    make_config,
    prefill_request,
)
from tests.fakes.workers import until

_PLACES = ("driver", "prefill-0", "decode-0", "decode-1")
# three chunks; each stands still for a second before its last layer is computed, so a transfer takes over three
SLOW = {"layer-3": {"action": "delay", "delay_s": 1.0, "times": None}}
ASK = Ask(tuple(range(7, 187)), "full:boundary=1", max_tokens=6)


async def start(net: Net, config: WorkerConfig, folder: Path) -> WorkerProcess:
    """A worker in the namespace that has its name; its log goes to a file of that name."""
    path = folder / f"{config.worker_id}.json"
    path.write_text(json.dumps(config.to_dict()))
    faults = {"SHOAL_FAULTS": json.dumps(SLOW)} if config.pool is Pool.PREFILL else {}
    with (folder / f"{config.worker_id}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *net.command(config.worker_id, sys.executable, "-m", f"shoal.{config.pool}_worker", str(path)),
            stdout=asyncio.subprocess.PIPE, stderr=log, env=os.environ | faults | {"PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 90)
    return WorkerProcess(process, json.loads(line)["address"], config.pool)


async def close(worker: WorkerProcess) -> None:
    """Drain and end it. One that does not end says where each of its threads stands, and fails the trial."""
    worker.process.terminate()
    try:
        await asyncio.wait_for(worker.process.wait(), 40)
    except TimeoutError:
        worker.process.send_signal(signal.SIGABRT)
        await worker.process.wait()
        raise
    finally:
        await worker.endpoint.close()


async def cut_between_legs(net: Net, prefill: Endpoint, decode: Endpoint) -> dict[str, Any]:
    """Both legs driven by hand, so that each end's own words are heard. Times count from the cut."""
    expected = await generate(ASK, prefill, decode)
    call = decode.decode.Decode(decode_request(ASK), timeout=60)
    events = aiter(call)
    reserved = (await anext(events)).reserved
    prefilling = asyncio.ensure_future(prefill.prefill.Prefill(prefill_request(ASK, reserved), timeout=60))
    await decode.until(Pool.DECODE, lambda load: load.num_transfers_in_flight > 0)
    await asyncio.sleep(0.5)
    told: dict[str, Any] = {}
    with net.cut("prefill-0", "decode-0"):
        cut_at = time.monotonic()

        async def heard(end: str, leg: Any) -> None:
            try:
                await leg
            except Exception as error:  # noqa: BLE001  (any of gRPC's)
                told[end] = {"after_s": time.monotonic() - cut_at, "code": error.code().name}  # type: ignore[attr-defined]

        async def rest() -> None:
            async for _ in events:
                pass

        await asyncio.gather(heard("prefill", prefilling), heard("decode", rest()))
        for end, endpoint, pool in (("prefill", prefill, Pool.PREFILL), ("decode", decode, Pool.DECODE)):
            await endpoint.idle(pool)
            await endpoint.until(pool, lambda load: not load.num_staging_in_use and not load.num_staging_quarantined)
            told[end]["free_after_s"] = time.monotonic() - cut_at
        try:
            await generate(replace(ASK, max_tokens=1), prefill, decode, timeout_s=20)
        except ShoalError as error:
            told["while_cut"] = type(error).__name__
    answer = await generate(ASK, prefill, decode)
    return told | {"same_tokens_after": answer.token_ids == expected.token_ids, "tokens": expected.token_ids}


async def cut_under_a_router(net: Net, model: str, workers: list[WorkerProcess]) -> dict[str, Any]:
    """A request through a router that knows both decode workers; the one it is on is cut off from prefill."""
    places = tuple(f"{worker.pool}={worker.endpoint.address}" for worker in workers)
    visibilities = tuple(Visibility.parse(text) for text in MIXED)
    listen = f"{net.addresses['driver']}:0"
    async with Router(
        RouterConfig(model, workers=places, listen=listen, visibilities=visibilities, local_prefill_tokens=0)
    ) as router:
        address = str(await router.start())
        await until(lambda: sum(worker.state == "ready" for worker in router.registry.workers) == 3, timeout_s=10)
        request = shoal_pb2.GenerateRequest(
            tokenized=shoal_pb2.TokenizedInput(input_ids=ASK.prompt_ids),
            sampling_params=shoal_pb2.SamplingParams(temperature=0, max_tokens=ASK.max_tokens, ignore_eos=True),
            visibility=ASK.visibility,
        )
        async with open_channel(address) as channel:

            async def ask() -> shoal_pb2.GenerateComplete:
                return [reply.complete async for reply in shoal_pb2_grpc.ShoalStub(channel).Generate(request, timeout=60)][-1]

            running = asyncio.create_task(ask())
            struck = ""
            async with asyncio.timeout(10):
                while not struck:
                    loads = {w.worker_id: await w.stub.GetLoad(_empty()) for w in router.registry.pool("decode")}
                    struck = next((name for name, load in loads.items() if load.num_transfers_in_flight), "")
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            with net.cut("prefill-0", struck):
                complete = await running
    return {
        "struck": struck, "decode_worker": complete.transfer.decode_worker, "num_retries": complete.num_retries,
        "notices": list(complete.notices), "tokens": list(complete.output_ids),
    }  # fmt: skip


def _empty() -> Any:
    from shoal.pb.internal.v1 import worker_pb2

    return worker_pb2.GetLoadRequest()


async def main(net: Net, folder: Path, model: str) -> dict[str, Any]:
    configs = [
        make_config(
            Pool(name.partition("-")[0]), model, name, host=net.addresses[name], chaos=name.startswith("prefill"),
            transfer=replace(TRANSFER, host=net.addresses[name]), prefix_cache=False,  # the same prompt crosses every time
        )
        for name in _PLACES[1:]
    ]  # fmt: skip
    workers = [await task for task in [asyncio.create_task(start(net, config, folder)) for config in configs]]
    try:
        prefill, decode, _ = (worker.endpoint for worker in workers)
        legs = await cut_between_legs(net, prefill, decode)
        log = (folder / "decode-0.log").read_text()
        pairs = {"made": log.count("pair from prefill worker prefill-0, epoch"), "closed": log.count("prefill-0 closed")}
        routed = await cut_under_a_router(net, model, workers)
        for worker in workers:
            await worker.endpoint.idle(worker.pool)
        return {"legs": legs, "pairs": pairs, "routed": routed}
    finally:
        await asyncio.gather(*(close(worker) for worker in workers))


if __name__ == "__main__":
    lab = Net(_PLACES)
    try:
        lab.make()
        lab.enter("driver")  # before any other thread runs
        print(json.dumps(asyncio.run(main(lab, Path(sys.argv[1]), sys.argv[2]))))
    finally:
        lab.remove()
        print("\n".join(path.read_text()[-4000:] for path in sorted(Path(sys.argv[1]).glob("*.log"))), file=sys.stderr)
