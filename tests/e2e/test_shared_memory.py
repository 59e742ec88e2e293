"""KV that decode reads where prefill has it: nothing of it crosses a socket, and nothing stale is ever used."""

import asyncio
import dataclasses
import json
import random
import signal
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch

from shoal.config.worker import Pool, WorkerConfig
from shoal.errors import InternalError, Mismatch, Unavailable
from shoal.kv_transfer import client as transfer_client
from shoal.kv_transfer.faults import VARIABLE
from shoal.kv_transfer.lending import Borrower
from shoal.pb.internal.v1 import transfer_pb2
from tests.e2e.harness import (
    MIXED,
    TRANSFER,
    Ask,
    Endpoint,
    WorkerProcess,
    decode_request,
    ends_with,
    generate,
    in_process,
    make_config,
    prefill_request,
    processes,
)

pytestmark = pytest.mark.e2e

SHARED = dataclasses.replace(TRANSFER, backend="shared-memory")
SOON_S = 8.0


def configs(model: Path, **changes: object) -> list[WorkerConfig]:
    return [make_config(pool, model, transfer=SHARED, **changes) for pool in (Pool.PREFILL, Pool.DECODE)]


def ask(seed: int, text: str = "full", num_tokens: int = 400, max_tokens: int = 6) -> Ask:
    rng = random.Random(seed)
    return Ask(tuple(rng.randrange(1, 500) for _ in range(num_tokens)), text, max_tokens=max_tokens)


def num_mappings(worker: WorkerProcess) -> int:
    """Of prefill workers' memory in a worker."""
    return Path(f"/proc/{worker.process.pid}/maps").read_text().count("memfd:shoal-kv")


async def test_pairs_have_a_control_stream_and_no_other_connection(tiny_model: Path, tmp_path: Path) -> None:
    async with processes(tmp_path, *configs(tiny_model)) as (prefill, decode):
        answers = [await generate(ask(1 + i, text), prefill.endpoint, decode.endpoint) for i, text in enumerate(MIXED)]
        payload = sum(answer.finished.received_payload_bytes for answer in answers if answer.finished is not None)
        assert payload == sum(answer.prefill.sent_payload_bytes for answer in answers if answer.prefill is not None) > 500_000
        assert num_mappings(decode) == 1
        port = int(decode.endpoint.address.rpartition(":")[2])
        connections = psutil.Process(decode.process.pid).net_connections("tcp")
        assert {one.laddr.port for one in connections} == {port}


async def test_a_reader_that_comes_late_uses_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode is held up before it reads; prefill's caller leaves meanwhile, and others get the blocks."""
    monkeypatch.setenv(VARIABLE, json.dumps({"before-post": {"action": "delay", "delay_s": 1.0}}))
    few = {"num_blocks": 4 * 54, "chaos": True}  # room for one such prompt
    async with in_process(*configs(tiny_model, **few)) as (*_, prefill_end, decode_end):
        call = decode_end.decode.Decode(decode_request(ask(1)))
        events = aiter(call)
        leg = asyncio.ensure_future(prefill_end.prefill.Prefill(prefill_request(ask(1), (await anext(events)).reserved)))
        await decode_end.until(Pool.DECODE, lambda load: load.num_staging_in_use > 0)
        leg.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for event in events:
                assert not event.HasField("tokens"), "it went on with KV that had been taken back"
        assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        other = await generate(ask(2), prefill_end, decode_end)
        again = await generate(ask(1), prefill_end, decode_end)
    monkeypatch.delenv(VARIABLE)
    async with in_process(*configs(tiny_model)) as (*_, prefill_end, decode_end):
        assert (await generate(ask(2), prefill_end, decode_end)).token_ids == other.token_ids
        assert (await generate(ask(1), prefill_end, decode_end)).token_ids == again.token_ids


async def test_memory_of_a_dead_prefill_worker_is_let_go(tiny_model: Path, tmp_path: Path) -> None:
    prefill, decode = configs(tiny_model)
    async with processes(tmp_path, prefill, decode) as (first, reader):
        expected = await generate(ask(1), first.endpoint, reader.endpoint)
        first.kill()
        for _ in range(int(SOON_S / 0.05)):
            if not num_mappings(reader):
                break
            await asyncio.sleep(0.05)
        assert not num_mappings(reader)
        async with processes(tmp_path, dataclasses.replace(prefill, epoch=1)) as (second,):
            salted = dataclasses.replace(ask(1), cache_salt="own")  # or decode would have it all
            assert (await generate(salted, second.endpoint, reader.endpoint)).token_ids == expected.token_ids
            assert num_mappings(reader) == 1


async def test_memory_is_let_go_after_reads_that_came_to_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """The first read comes late, the second fails otherwise: their errors live on, prefill's memory and buffers do not."""
    prefill, decode = configs(tiny_model, chaos=True)
    reads = {"before-post": {"action": "delay", "delay_s": 0.5}, "after-receive": {"action": "raise"}}
    async with processes(tmp_path, prefill) as (source,):
        reader = await WorkerProcess.start(decode, tmp_path, reads)
        try:
            events = aiter(reader.endpoint.decode.Decode(decode_request(ask(1))))
            leg = asyncio.ensure_future(source.endpoint.prefill.Prefill(prefill_request(ask(1), (await anext(events)).reserved)))
            await reader.endpoint.until(Pool.DECODE, lambda load: load.num_staging_in_use > 0)
            leg.cancel()
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(events)
            assert isinstance(await ends_with(generate(ask(2), source.endpoint, reader.endpoint)), Unavailable)
            await generate(ask(3), source.endpoint, reader.endpoint)
            assert num_mappings(reader) == 1 and not (await reader.endpoint.load(Pool.DECODE)).num_staging_in_use
            source.kill()
            for _ in range(int(SOON_S / 0.05)):
                if not num_mappings(reader):
                    break
                await asyncio.sleep(0.05)
            assert not num_mappings(reader)
        finally:
            await reader.close()


async def test_a_read_that_fails_unforeseen_ends_its_request_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads outlives whatever reading raises, and says what it was."""
    read, num_calls = Borrower.read, 0

    def failing(self: Borrower, *arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ZeroDivisionError("of a kind that nobody foresaw")
        return read(self, *arguments)

    monkeypatch.setattr(Borrower, "read", failing)
    async with in_process(*configs(tiny_model)) as (*_, prefill_end, decode_end):
        assert isinstance(await ends_with(generate(ask(1), prefill_end, decode_end)), InternalError)
        await generate(ask(1), prefill_end, decode_end)
        load = await decode_end.idle(Pool.DECODE)
        assert (load.num_used_blocks, load.num_staging_in_use) == (0, 0)


async def test_a_stopped_decode_worker_takes_nothing_stale(tiny_model: Path, tmp_path: Path) -> None:
    """SIGSTOP in the middle of transfers: prefill gives the pair up and its blocks to others. Woken, decode answers truly."""
    prefill, decode = configs(tiny_model, num_blocks=4 * 120, chaos=True)
    slow = {"layer-2": {"action": "delay", "delay_s": 0.3, "times": None}}  # else a transfer is over before anybody has looked
    async with processes(tmp_path, prefill, decode, faults=slow) as (source, reader):
        expected = [(await generate(ask(i), source.endpoint, reader.endpoint)).token_ids for i in range(3)]
        anew = [dataclasses.replace(ask(i), cache_salt="own") for i in range(3)]  # or both workers would have all of it
        running = [asyncio.create_task(_tokens_or_error(one, source.endpoint, reader.endpoint)) for one in anew]
        await source.endpoint.until(Pool.PREFILL, lambda load: load.num_transfers_in_flight > 0)
        reader.process.send_signal(signal.SIGSTOP)
        await source.endpoint.idle(Pool.PREFILL, timeout_s=20.0)  # the pair was given up
        reader.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*running)
        for end, tokens in zip(ends, expected, strict=True):
            assert end is None or end == tokens
        await reader.endpoint.idle(Pool.DECODE)
        for i, tokens in enumerate(expected):
            assert (await generate(ask(i), source.endpoint, reader.endpoint)).token_ids == tokens


async def test_workers_that_share_no_memory_are_told_what_to_choose(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = transfer_pb2.SharedPool(pid=1 << 23, descriptor=3, num_bytes=4096, secret=bytes(32))
    monkeypatch.setattr(transfer_client, "offered", lambda memory: stranger)
    async with in_process(*configs(tiny_model)) as (*_, prefill_end, decode_end):
        error = await ends_with(generate(ask(1), prefill_end, decode_end))
        assert isinstance(error, Mismatch | Unavailable) and "use gloo" in str(error)


async def _tokens_or_error(request: Ask, prefill: Endpoint, decode: Endpoint) -> list[int] | None:
    try:
        return (await generate(request, prefill, decode)).token_ids
    except Exception:  # noqa: BLE001  # ended; what matters is that it did not go on wrongly
        return None
