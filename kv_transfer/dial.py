"""How a prefill worker reaches a decode worker: channel, stream, Hello and Welcome. Knows gRPC's errors; knows no transfers."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from shoal.config.transfer import MAX_HEARTBEAT_S
from shoal.errors import InternalError, ShoalError, Unavailable
from shoal.kv_transfer import wire
from shoal.kv_transfer.faults import Faults
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.pb.internal.v1 import transfer_pb2_grpc

Connect = Callable[[str], grpc.aio.Channel]
ControlCall = grpc.aio.StreamStreamCall[pb.SenderMessage, pb.ReceiverMessage]


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """A decode worker as its reservation names it."""

    address: str  # host:port of its gRPC server
    worker_id: str
    epoch: int


class Dialled:
    """A control stream that has been opened but perhaps not yet greeted."""

    def __init__(self, target: DecodeTarget, connect: Connect) -> None:
        self.target = target
        self._channel = connect(target.address)
        self.call: ControlCall = transfer_pb2_grpc.TransferStub(self._channel).Control()

    async def greet(self, hello: pb.Hello, faults: Faults) -> pb.Welcome:
        """Exchange Hello and Welcome. Raises Unavailable, or the error that decode refuses the pair with."""
        try:
            if not await faults.reach("before-hello"):
                await self.call.write(pb.SenderMessage(hello=hello))
            await faults.reach("after-hello")
        except grpc.aio.AioRpcError as error:
            raise self._stream_error(error) from None
        answer = await self.read()
        if answer is None:
            raise Unavailable(f"decode worker {self.target.worker_id} closed the control stream before its Welcome")
        kind = answer.WhichOneof("message")
        if kind is not None:
            await faults.reach(f"on-{kind}")
        if kind == "reject":
            raise wire.rejected(answer.reject)
        if kind != "welcome" or not 0 < answer.welcome.heartbeat_s <= MAX_HEARTBEAT_S:
            raise InternalError(f"decode worker {self.target.worker_id} answered Hello with {kind!r}, not a proper Welcome")
        return answer.welcome

    async def read(self) -> pb.ReceiverMessage | None:
        """The next message, or None at the stream's end. Raises Unavailable when it breaks."""
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise self._stream_error(error) from None
        return message if isinstance(message, pb.ReceiverMessage) else None

    def _stream_error(self, error: grpc.aio.AioRpcError) -> ShoalError:
        """gRPC's error in our words. Retry is safe: nothing of an unacknowledged transfer has been used."""
        return Unavailable(
            f"the control stream to decode worker {self.target.worker_id} at {self.target.address} ended: "
            f"{error.code().name} {error.details() or ''}".rstrip()
        )

    async def hang_up(self) -> None:
        """End the stream and its connection."""
        self.call.cancel()
        await self._channel.close(None)
