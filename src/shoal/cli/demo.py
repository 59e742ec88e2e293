"""`shoal demo`: a cluster on free ports, answers under several visibilities, and what each cost. Fails when a count is off."""

import asyncio
import signal
import sys
from typing import Any, Final

import click
import grpc
from rich.console import Console
from rich.text import Text

from shoal.cli.demo_prompts import LONG, SHORT
from shoal.cli.demo_report import Answer, print_blocks, print_bytes, print_times
from shoal.cli.failure import told_in_one_line
from shoal.cli.own_cluster import own_cluster
from shoal.cli.preflight import check
from shoal.cli.supervisor import ClusterFailed
from shoal.config.reading import parse_list
from shoal.config.serve import ServeConfig
from shoal.model_files import DEFAULT_MODEL
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import error_from_rpc, open_channel
from shoal.types import DType, ModelShape

VISIBILITIES: Final = "full,speed:26,speed:22,pop:20,pop:20:late"
_MIN_WIDTH: Final = 80  # of the tables
_DRAIN_S: Final = 3.0  # how long blocks may take to come back after the last answer


@click.command(short_help="Stream answers under full, speed and pop, and show what each cost.")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A known model, a .gguf file or a folder.")
@click.option("--visibilities", default=VISIBILITIES, show_default=True, help="What to compare, the first as the baseline.")
@click.option("--dtype", default=str(DType.FLOAT32), show_default=True, help="float32 or bfloat16.")
@click.option("--max-tokens", default=40, show_default=True, help="Tokens of each answer to the long prompt.")
def demo(model: str, visibilities: str, dtype: str, max_tokens: int) -> None:
    """Start a small cluster on this machine, stream answers of a real chat model under each visibility, then print time, bytes
    and KV for each beside the formulas. Ends non-zero when a count differs or a KV block stays behind.
    """
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    with told_in_one_line():
        config = ServeConfig(
            model=model,
            dtype=dtype,
            visibilities=parse_list(visibilities),
            listen="127.0.0.1:0",
            local_prefill_tokens=0,  # to show what crosses for the short prompt too
            prefix_cache=False,  # and for every prompt all of it
            grace_s=2.0,
            log_level="warning",
        )
        shape = check(config).config.shape
        complaints = asyncio.run(_demo(config, shape, max_tokens, console))
    for complaint in complaints:
        console.print(f"WRONG: {complaint}", style="bold red", markup=False, soft_wrap=True)
    sys.exit(1 if complaints else 0)


async def _demo(config: ServeConfig, shape: ModelShape, max_tokens: int, console: Console) -> list[str]:
    """The whole demo; returns what is wrong, in words."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    try:
        async with own_cluster(config, console) as address, open_channel(address) as channel:
            stub = shoal_pb2_grpc.ShoalStub(channel)
            await _ask(stub, LONG, config.visibilities[0], 4, None)  # warm-up: first contact between the pair, caches
            answers: dict[str, list[Answer]] = {"long": [], "short": []}
            for visibility in config.visibilities:
                console.print()
                console.rule(Text(visibility, style="bold"), align="left")
                for name, prompt, limit in (("long", LONG, max_tokens), ("short", SHORT, 24)):
                    console.print(f"[dim]{name} prompt ▸[/dim] ", end="")
                    complete = await _ask(stub, prompt, visibility, limit, console)
                    answers[name].append(Answer(complete, shape, DType(config.dtype)))
            console.print()
            for name, some in answers.items():
                console.rule(f"{name} prompt", align="left")
                print_times(console, some)
                print_bytes(console, some)
            loads = await _drained(stub)
            print_blocks(console, loads)
            complaints = [words for some in answers.values() for answer in some for words in answer.differences()]
            holders = [load for load in loads if load.num_used_blocks]
            complaints += [f"{load.worker_id} still holds {load.num_used_blocks} blocks" for load in holders]
            if not complaints:
                console.print("Every byte on the wire and every KV token is what the formulas say; all blocks are free again.")
            return complaints
    except asyncio.CancelledError:
        return ["interrupted"]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def _ask(stub: Any, prompt: str, visibility: str, max_tokens: int, console: Console | None) -> shoal_pb2.GenerateComplete:
    """One chat request, greedy; the text is printed as it comes."""
    request = shoal_pb2.GenerateRequest(
        chat=shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(role="user", content=prompt)]),
        sampling_params=shoal_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens),
        stream=True,
        visibility=visibility,
    )
    complete: shoal_pb2.GenerateComplete | None = None
    async for response in stub.Generate(request, timeout=120.0):
        if response.HasField("complete"):
            complete = response.complete
        elif console is not None:
            console.print(response.chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
            console.file.flush()
    if console is not None:
        console.print()
    if complete is None:
        raise ClusterFailed("the answer ended without its final message")
    return complete


async def _drained(stub: Any) -> list[shoal_pb2.WorkerLoad]:
    """Loads of every worker, once all blocks are free or the time for it has passed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DRAIN_S
    while True:
        loads = list((await stub.GetLoads(shoal_pb2.GetLoadsRequest(), timeout=5.0)).loads)
        if loop.time() > deadline or not any(load.num_used_blocks for load in loads):
            return loads
        await asyncio.sleep(0.1)
