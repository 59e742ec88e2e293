"""How fast KV crosses between two processes on one core each: a plain socket, Gloo's channel, and the whole handoff.

All move the same bytes in the same messages, in turns. The handoff adds one copy out of the KV pool, one copy into the other, a
CRC-32 on both sides, and the control stream; it is timed with and without the CRC.
"""

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.config.transfer import TransferConfig
from shoal.decode_worker.sink import DecodeSink
from shoal.engine.affinity import keep_to_cpus
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.kv_transfer import DecodeTarget, Handle, TransferClient, TransferServer, guard
from shoal.kv_transfer.checksum import checksum
from shoal.kv_transfer.gloo import GlooChannel
from shoal.model_files import open_model
from shoal.pb.internal.v1 import transfer_pb2_grpc
from shoal.placement.blocks import BlockPool
from shoal.placement.plan import TransferPlan, make_plan
from shoal.placement.tables import KvLayout, RequestTables
from shoal.prefill_worker.source import PrefillSource
from shoal.types import DType, Fingerprint
from shoal.visibility import Visibility

HOST: Final = "127.0.0.1"
TOKENS: Final = 7937  # 7,936 cross: 182 MB in bfloat16
WINDOW: Final = 4  # messages in flight, as TransferConfig.max_receives_in_flight
REPEATS: Final = 7
WAYS: Final = ("socket", "gloo", "handoff", "handoff, no CRC")


def measure(*cpus: int) -> dict[str, list[float]]:
    """Payload rates in bytes per second, by way, ways in turns."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    peers = [context.Process(target=_peer, args=(end, cpu, theirs[end]), daemon=True) for end, cpu in enumerate(cpus)]
    for peer in peers:
        peer.start()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        ours[0].send(ours[1].recv())  # the receiver's addresses
        for repeat in range(REPEATS + 1):
            for way in WAYS:
                for end in (1, 0):
                    ours[end].send((way, f"{way}-{repeat}"))
                seconds, num_bytes = ours[0].recv()
                ours[1].recv()
                if repeat:
                    rates[way].append(num_bytes / seconds)
    finally:
        for end in ours:
            end.send(None)
        for peer in peers:
            peer.join(10)
    return rates


def print_rates(*cpus: int) -> float:
    """A Markdown table; returns the handoff's own rate."""
    rates = measure(*cpus)
    plain = statistics.median(rates["socket"])
    print("\n### Payload rate, one core at each end (GB/s: median, spread)\n\n| | GB/s | / socket |\n|---|---|---|")
    for way, found in rates.items():
        median = statistics.median(found)
        print(f"| {way} | {median / 1e9:.2f} ({min(found) / 1e9:.2f}–{max(found) / 1e9:.2f}) | {median / plain:.2f} |")
    return statistics.median(rates["handoff"])


def _peer(end: int, cpu: int, told: Connection) -> None:
    keep_to_cpus((cpu,))
    torch.set_num_threads(1)
    asyncio.run(_Peer(end, told).run())


class _Peer:
    """End 0 sends, end 1 receives."""

    def __init__(self, end: int, told: Connection) -> None:
        self.end, self.told = end, told
        shape = open_model("smollm2-135m").config.shape
        visibility = Visibility.parse("full").resolve(shape.num_layers, 1)
        layout = KvLayout.of(shape.num_layers, visibility, TOKENS)
        num_blocks = shape.num_layers * -(-TOKENS // 16)
        self.pool = KvPool(shape, num_blocks, 16, DType.BFLOAT16)
        tables = RequestTables(BlockPool(num_blocks), 16, layout)
        tables.reserve(TOKENS, 0)
        self.kv = RequestKv.of(tables)
        self.config = TransferConfig()
        wire = {"max_entry_bytes": self.config.max_entry_bytes, "max_entry_tokens": self.config.max_entry_tokens}
        self.plan: TransferPlan = make_plan(shape, DType.BFLOAT16, visibility, TOKENS, 0, **wire)
        self.fingerprint = Fingerprint(
            "r", "", shape.num_layers, shape.hidden_size, shape.num_kv_heads, shape.head_dim, DType.BFLOAT16, 16, "r", **wire
        )
        self.visibility = str(visibility)
        self.sizes = _messages([entry.num_bytes for entry in self.plan.entries], self.config.max_entry_bytes)
        self.buffers = [torch.zeros(max(self.sizes), dtype=torch.uint8) for _ in range(WINDOW)]

    async def run(self) -> None:
        common: dict[str, Any] = {"worker_id": f"p{self.end}", "epoch": 1, "fingerprint": self.fingerprint, "config": self.config}
        if self.end:
            listener = socket.create_server((HOST, 0))
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self.server = TransferServer(**common)
            front = grpc.aio.server()
            transfer_pb2_grpc.add_TransferServicer_to_server(self.server, front)
            port = front.add_insecure_port(f"{HOST}:0")
            await front.start()
            self.told.send((listener.getsockname()[1], store.port, port))
            self.socket, _ = await asyncio.to_thread(listener.accept)
            self.channel = await asyncio.to_thread(GlooChannel, store, 0, HOST, 30.0)
        else:
            tcp, store_port, port = await asyncio.to_thread(self.told.recv)
            self.client, self.target = TransferClient(**common), DecodeTarget(f"{HOST}:{port}", "p1", 1)
            self.socket = socket.create_connection((HOST, tcp))
            store = TCPStore(HOST, store_port, is_master=False)
            self.channel = await asyncio.to_thread(GlooChannel, store, 1, HOST, 30.0)
        while (order := await asyncio.to_thread(self.told.recv)) is not None:
            way, name = order
            guard.checksum = _no_checksum if way.endswith("no CRC") else checksum  # type: ignore[attr-defined]  # at both ends
            begin = time.perf_counter()
            match way:
                case "socket":
                    await asyncio.to_thread(self._socket)
                case "gloo":
                    await asyncio.to_thread(self._gloo)
                case _:
                    begin = await self._handoff(name)
            self.told.send((time.perf_counter() - begin, sum(self.sizes)))
        self.told.close()
        os._exit(0)  # the groups' own threads need no orderly end

    def _socket(self) -> None:
        if not self.end:
            for at, size in enumerate(self.sizes):
                self.socket.sendall(self.buffers[at % WINDOW].numpy().data[:size])
            self.socket.recv(1)
            return
        for at, size in enumerate(self.sizes):
            view = self.buffers[at % WINDOW].numpy().data[:size]
            while len(view):
                view = view[self.socket.recv_into(view) :]
        self.socket.sendall(b"!")

    def _gloo(self) -> None:
        move = self.channel.post_recv if self.end else self.channel.send
        pending: deque[Any] = deque()
        for at, size in enumerate(self.sizes):
            if len(pending) == WINDOW:
                pending.popleft().wait(30.0)
            pending.append(move(at, self.buffers[at % WINDOW][:size]))
        for issued in pending:
            issued.wait(30.0)

    async def _handoff(self, name: str) -> float:
        handle = Handle(name, self.fingerprint, self.visibility, TOKENS, 0, self.plan.digest)
        if self.end:
            sink = DecodeSink(self.pool, self.kv, None, lambda entry: None)
            await self.server.expect(name, handle, self.plan, sink).wait()
            return 0.0
        source = PrefillSource(self.pool)
        source.hold(self.kv, None)
        await asyncio.sleep(0.05)  # until the other end expects it
        transfer = await self.client.open(self.target, handle, self.plan, source)
        begin = time.perf_counter()
        transfer.entries_ready(range(len(self.plan.entries)))
        await transfer.wait()
        return begin


def _messages(sizes: list[int], max_bytes: int) -> list[int]:
    """Entries joined as the sender joins what is ready at once."""
    messages: list[int] = []
    for size in sizes:
        if messages and messages[-1] + size <= max_bytes:
            messages[-1] += size
        else:
            messages.append(size)
    return messages


def _no_checksum(buffer: torch.Tensor) -> int:
    return 0


if __name__ == "__main__":
    print_rates(0, 1)
