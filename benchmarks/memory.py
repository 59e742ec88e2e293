"""What shallow prefill saves in memory: KV per request, requests that fit a budget, and a prefill worker's own size.

    python -m benchmarks.memory [--visibilities full,speed:22,pop:20] [--kv-memory 96MiB]

For each visibility one prefill worker, one decode worker and a router are started as processes that may be asked for nothing
else. Then more requests than fit are sent at once, no two prompts alike, and decode is watched: how many hold blocks at
once and how many blocks each holds. Beside that what the formulas say (placement/arithmetic.py, placement/reservation.py). KV is
taken in whole blocks, so a request holds a little more than its tokens.
"""

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pinned_cluster import pinned_cluster, workers
from shoal.client import AsyncClient, Sampling
from shoal.config.reading import parse_list, parse_size
from shoal.engine.kv_pool import block_bytes
from shoal.model_files import open_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.placement.arithmetic import decode_kv_layer_tokens, kv_bytes
from shoal.placement.reservation import decode_reservation
from shoal.rpc import open_channel
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

_MIB = 1 << 20
_COLUMNS = (
    "KV by formula, MiB", "in whole blocks", "held", "fit, predicted", "fit, seen", "factor, formula", "factor, seen",
    "layers at prefill", "weights read there, MiB", "prefill resident, MiB", "decode resident, MiB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """One visibility's figures, counted on running workers."""

    num_together: int  # requests that held blocks at once, at most
    num_blocks: int  # that they held together
    num_total_blocks: int
    prefill: shoal_pb2.WorkerLoad
    decode: shoal_pb2.WorkerLoad


async def watch(address: str, asks: int, visibility: str, num_prompt: int, num_tokens: int, vocab_size: int) -> Seen:
    """Send all requests at once and look at the pools until they are answered."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(num_prompt)] for _ in range(asks)]
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    async with AsyncClient(address) as client, open_channel(address) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)

        async def loads() -> dict[str, shoal_pb2.WorkerLoad]:
            found = await stub.GetLoads(shoal_pb2.GetLoadsRequest(), timeout=10)
            return {load.pool: load for load in found.loads}

        await client.complete(token_ids=prompts[0], sampling=sampling, visibility=visibility)
        running = asyncio.gather(*(client.complete(token_ids=ids, sampling=sampling, visibility=visibility) for ids in prompts))
        best, latest = (0, 0), await loads()
        while not running.done():
            latest = await loads()
            best = max(best, (latest["decode"].num_reservations, latest["decode"].num_used_blocks))
            await asyncio.sleep(0.01)
        await running
    return Seen(*best, latest["decode"].num_total_blocks, latest["prefill"], latest["decode"])


def rows(shape: ModelShape, dtype: DType, block_size: int, num_prompt: int, num_tokens: int, seen: dict[str, Seen]) -> list[str]:
    """The table's lines."""
    size = block_bytes(shape, block_size, dtype)
    lines = []
    first_fit, first_bytes = 0, 0
    for text, own in seen.items():
        visibility = Visibility.parse(text).resolve(shape.num_layers)
        formula = kv_bytes(shape, dtype, decode_kv_layer_tokens(shape, visibility, num_prompt, num_tokens))
        blocks = decode_reservation(shape, dtype, block_size, visibility, num_prompt, num_tokens).num_blocks
        first_fit, first_bytes = first_fit or own.num_together, first_bytes or formula
        held = own.num_blocks * size / own.num_together
        sizes = [f"{num_bytes / _MIB:.2f}" for num_bytes in (formula, blocks * size, held)]
        fits = [str(own.num_total_blocks // blocks), str(own.num_together)]
        factors = [f"{first_bytes / formula:.2f}", f"{own.num_together / first_fit:.2f}"]
        whole = (own.prefill.weight_bytes_read, own.prefill.resident_bytes, own.decode.resident_bytes)
        workers_have = [str(own.prefill.num_layers_held), *(f"{num_bytes / _MIB:.0f}" for num_bytes in whole)]
        figures = [*sizes, *fits, *factors, *workers_have]
        lines.append(f"| `{text}` | " + " | ".join(figures) + " |")
    return lines


async def measure(options: argparse.Namespace) -> None:
    """Every visibility in turn, then the table."""
    model = open_model(options.model)
    shape, dtype = model.config.shape, DType(options.dtype)
    cpus = sorted(os.sched_getaffinity(0))
    seen: dict[str, Seen] = {}
    for text in parse_list(options.visibilities):
        prefill, decode = workers(
            options.model, options.dtype, [text], kv_memory_bytes=parse_size(options.kv_memory), prefix_cache=False
        )
        places = {"prefill_cpus": cpus, "decode_cpus": cpus, "router_cpus": cpus}
        async with pinned_cluster(prefill, decode, **places, router_arguments=("--max-wait-s", "0")) as address:
            seen[text] = await watch(
                address, options.requests, text, options.prompt_tokens, options.answer_tokens, shape.vocab_size
            )
    print(
        f"{options.model}, {options.dtype}: {options.requests} requests of {options.prompt_tokens} prompt and "
        f"{options.answer_tokens} answer tokens at once, KV pool of {options.kv_memory}\n"
    )
    print("| visibility | " + " | ".join(_COLUMNS) + " |")
    print("|---" + "|---:" * len(_COLUMNS) + "|")
    print("\n".join(rows(shape, dtype, 16, options.prompt_tokens, options.answer_tokens, seen)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--visibilities", default="full,speed:22,speed:15,pop:20")
    parser.add_argument("--kv-memory", default="96MiB")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=448)
    parser.add_argument("--answer-tokens", type=int, default=32)
    asyncio.run(measure(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
