"""A worker process for transfer tests: real gRPC, real Gloo, a source and a sink of deterministic random bytes, JSON commands.

`python transfer_peer.py SOCKET` imports everything once and forks a peer for every connection to the Unix socket, so that a
test can kill peers without paying for torch again. A peer answers each line {"id", "do", …} with {"id", "result" | "error"}.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from typing import Any

import grpc
import numpy as np
import psutil
import torch

from shoal.config.transfer import TransferConfig
from shoal.errors import ShoalError
from shoal.kv_transfer import DecodeTarget, Faults, Handle, IncomingTransfer, OutgoingTransfer, TransferClient, TransferServer
from shoal.kv_transfer import metrics as transfer_metrics
from shoal.kv_transfer.faults import Fault
from shoal.pb.internal.v1 import transfer_pb2_grpc
from shoal.placement.plan import Entry, TransferPlan, make_plan
from shoal.types import DType, Fingerprint, ModelShape
from shoal.visibility import Visibility

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=8,
    vocab_size=8,
    max_context=1 << 16,
)


def content(seed: int, entry: Entry) -> np.ndarray:
    """The bytes of an entry: what the source packs and the sink must find."""
    return np.random.Generator(np.random.SFC64([seed, entry.index])).integers(0, 256, entry.num_bytes, dtype=np.uint8)


class Source:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def pack(self, entry: Entry, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(content(self.seed, entry)))


class Sink:
    """Keeps a digest and the time of every entry, and counts calls after its blocks were freed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.wrong, self.times, self.freed, self.late = seed, 0, {}, False, 0

    def unpack(self, entry: Entry, data: torch.Tensor) -> None:
        self.late += self.freed
        same = hashlib.sha256(data.numpy().data).digest() == hashlib.sha256(content(self.seed, entry).data).digest()
        self.wrong += not same
        self.times[entry.index] = time.monotonic()


class Peer:
    """One end, prefill or decode, driven by commands; `do_<name>` is a command."""

    def __init__(self) -> None:
        self.incoming: dict[str, tuple[IncomingTransfer, Sink]] = {}
        self.outgoing: dict[str, tuple[OutgoingTransfer, Source, TransferPlan]] = {}
        self.client: TransferClient | None = None
        self.server: TransferServer | None = None
        self.grpc: grpc.aio.Server | None = None

    async def do_start(self, role: str, worker_id: str, epoch: int, config: dict, fingerprint: dict, faults: dict) -> dict:
        self.config = TransferConfig(**config)
        shape: dict[str, Any] = {
            "revision": "r1", "adapter": "", "num_layers": SHAPE.num_layers, "hidden_size": SHAPE.hidden_size,
            "num_kv_heads": SHAPE.num_kv_heads, "head_dim": SHAPE.head_dim, "dtype": "bfloat16", "block_size": 16,
            "rope": "theta=1e4",
            "max_entry_bytes": self.config.max_entry_bytes, "max_entry_tokens": self.config.max_entry_tokens, **fingerprint,
        }  # fmt: skip
        self.fingerprint = Fingerprint(**{**shape, "dtype": DType(shape["dtype"])})
        common: dict[str, Any] = {"worker_id": worker_id, "epoch": epoch, "fingerprint": self.fingerprint, "config": self.config}
        common["faults"] = Faults({point: Fault(**fault) for point, fault in faults.items()})
        if role == "prefill":
            self.client = TransferClient(**common)
            return {"pid": os.getpid()}
        self.server = TransferServer(**common)
        self.grpc = grpc.aio.server()
        transfer_pb2_grpc.add_TransferServicer_to_server(self.server, self.grpc)
        port = self.grpc.add_insecure_port("127.0.0.1:0")
        await self.grpc.start()
        return {"pid": os.getpid(), "target": [f"127.0.0.1:{port}", worker_id, epoch]}

    def plan(self, tokens: int, visibility: str) -> tuple[TransferPlan, str]:
        resolved = Visibility.parse(visibility).resolve(SHAPE.num_layers)
        wire = {"max_entry_bytes": self.config.max_entry_bytes, "max_entry_tokens": self.config.max_entry_tokens}
        return make_plan(SHAPE, self.fingerprint.dtype, resolved, tokens, 0, **wire), str(resolved)

    def handle(self, attempt: str, tokens: int, visibility: str) -> tuple[Handle, TransferPlan]:
        plan, text = self.plan(tokens, visibility)
        return Handle(attempt, self.fingerprint, text, tokens, 0, plan.digest), plan

    async def do_expect(self, attempt: str, seed: int, tokens: int, visibility: str = "full") -> dict:
        assert self.server is not None
        handle, plan = self.handle(attempt, tokens, visibility)
        sink = Sink(seed)
        self.incoming[attempt] = (self.server.expect(attempt, handle, plan, sink), sink)
        return {"plan_bytes": plan.num_bytes, "num_entries": len(plan.entries)}

    async def do_receive(self, attempt: str) -> dict:
        transfer, sink = self.incoming[attempt]
        try:
            report = await transfer.wait()
        finally:
            sink.freed = True
        return {
            "payload_bytes": report.payload_bytes,
            "header_bytes": report.header_bytes,
            "wrong": sink.wrong,
            "num": len(sink.times),
        }

    async def do_send(
        self,
        target: list,
        attempt: str,
        seed: int,
        tokens: int,
        visibility: str = "full",
        late_s: float = 0.0,
        cancel_s: float = -1.0,
    ) -> dict:
        """Open and send everything, the last layer `late_s` later; give it up after `cancel_s` if that is not negative."""
        assert self.client is not None
        loop = asyncio.get_running_loop()
        handle, plan = self.handle(attempt, tokens, visibility)
        source = Source(seed)
        if cancel_s >= 0:
            sending = asyncio.create_task(self.client.open(DecodeTarget(*target), handle, plan, source))
            done, _ = await asyncio.wait([sending], timeout=cancel_s)
            if not done:
                sending.cancel()
            transfer = await sending
            loop.call_later(cancel_s, transfer.cancel, "the test gives up")
        else:
            transfer = await self.client.open(DecodeTarget(*target), handle, plan, source)
        last = max(entry.layer for entry in plan.entries)
        early = [entry.index for entry in plan.entries if entry.layer < last or not late_s]
        transfer.begin_step()
        await loop.run_in_executor(None, _step, transfer, early)  # as the step loop does, from another thread
        if late_s:
            await asyncio.sleep(late_s)
            transfer.entries_ready([entry.index for entry in plan.entries if entry.layer == last])
        try:
            report = await transfer.wait()
        finally:
            await transfer.released()
        return {"payload_bytes": report.payload_bytes, "header_bytes": report.header_bytes, "plan_bytes": plan.num_bytes}

    async def do_prewarm(self, target: list) -> dict:
        assert self.client is not None
        await self.client.prewarm(DecodeTarget(*target))
        return {}

    async def do_cancel(self, attempt: str, after_s: float = 0.0) -> dict:
        await asyncio.sleep(after_s)
        for _ in range(2):  # idempotent
            self.incoming[attempt][0].cancel("the test gives up")
        self.incoming[attempt][1].freed = True
        return {}

    async def do_unpacked(self, attempt: str) -> dict:
        return {"num": len(self.incoming[attempt][1].times)}

    async def do_state(self) -> dict:
        end = self.client or self.server
        assert end is not None
        skipped = transfer_metrics.SKIPPED._value.get()
        return {
            "in_use": end.num_staging_in_use,
            "quarantined": end.num_staging_quarantined,
            "pairs": end.num_pairs,
            "expected": self.server.num_expected if self.server else 0,
            "late_unpacks": sum(sink.late for _, sink in self.incoming.values()),
            "wrong_entries": sum(sink.wrong for _, sink in self.incoming.values()),
            "skipped_bytes": skipped,
        }

    async def do_tcp(self) -> dict:
        """Payload the kernel has sent and received on this process's TCP sockets: nobody of ours counted it."""
        sent = received = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                acked, got = struct.unpack_from("QQ", info, 120)  # tcpi_bytes_acked, tcpi_bytes_received
                sent, received = sent + acked, received + got
        return {"sent": sent, "received": received}

    async def do_listening(self) -> dict:
        """The hosts this process listens on."""
        connections = psutil.Process().net_connections(kind="tcp")
        return {"hosts": sorted({c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN})}

    async def do_close(self) -> dict:
        if self.client is not None:
            await self.client.close()
        if self.server is not None and self.grpc is not None:
            await self.server.close()
            await self.grpc.stop(0)
        return {}


def _step(transfer: OutgoingTransfer, indices: list[int]) -> None:
    for index in indices:
        transfer.complete([index])
    transfer.end_step()


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    peer = Peer()
    tasks = set()

    async def answer(line: bytes) -> None:
        command = json.loads(line)
        started = time.monotonic()
        try:
            reply = {"result": await getattr(peer, "do_" + command.pop("do"))(**{k: v for k, v in command.items() if k != "id"})}
        except (ShoalError, asyncio.CancelledError) as error:
            reply = {"error": type(error).__name__, "words": str(error)}
        reply |= {"id": command["id"], "seconds": time.monotonic() - started}
        writer.write(json.dumps(reply).encode() + b"\n")

    while line := await reader.readline():
        task = asyncio.create_task(answer(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # the test has hung up


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(16)
    print("ready", flush=True)
    parent = os.getppid()
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            connection.setblocking(False)
            asyncio.run(serve(connection))
        connection.close()


if __name__ == "__main__":
    main()
