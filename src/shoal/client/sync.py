"""The synchronous client. Thin: builds a request, makes the call, hands out typed values."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from shoal.client.requests import Prompt, Sampling, build_request, read_error
from shoal.client.types import Chunk, Completion, read_reply
from shoal.errors import InternalError
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_sync_channel

Reply = TypeVar("Reply")


class Client:
    """A connection to a router.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("Why do fish swim in shoals?", visibility="speed:22"):
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)
            else:
                print("\\n", event.finish_reason, event.timings.ttft_ms, event.transfer.payload_bytes)

    Calls raise the classes of shoal.errors; `timeout_s` is the deadline of a call.
    """

    def __init__(self, address: str = "127.0.0.1:50051", *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._channel = open_sync_channel(address, credentials)
        self._stub: Any = shoal_pb2_grpc.ShoalStub(self._channel)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        visibility: str | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[Chunk | Completion]:
        """Stream an answer: chunks as they come, then one Completion. Leaving the loop early cancels the request."""
        request = build_request(
            prompt, system=system, raw=raw, token_ids=token_ids, sampling=sampling, visibility=visibility,
            request_id=request_id, stream=True,
        )  # fmt: skip
        return self._events(request, timeout_s)

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        visibility: str | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer at once."""
        request = build_request(
            prompt, system=system, raw=raw, token_ids=token_ids, sampling=sampling, visibility=visibility,
            request_id=request_id, stream=False,
        )  # fmt: skip
        for event in self._events(request, timeout_s):
            if isinstance(event, Completion):
                return event
        raise InternalError("the server ended the stream without an answer")

    def abort(self, *request_ids: str) -> int:
        """End running requests with these ids; returns how many there were."""
        reply = self._call(self._stub.Abort, shoal_pb2.AbortRequest(request_ids=request_ids))
        return int(reply.num_aborted)

    def model_info(self) -> shoal_pb2.GetModelInfoResponse:
        """The served model and what requests may ask for."""
        reply: shoal_pb2.GetModelInfoResponse = self._call(self._stub.GetModelInfo, shoal_pb2.GetModelInfoRequest())
        return reply

    def server_info(self) -> shoal_pb2.GetServerInfoResponse:
        """Version, uptime and the workers that the router knows."""
        reply: shoal_pb2.GetServerInfoResponse = self._call(self._stub.GetServerInfo, shoal_pb2.GetServerInfoRequest())
        return reply

    def loads(self) -> Sequence[shoal_pb2.WorkerLoad]:
        """What every worker holds now."""
        reply: shoal_pb2.GetLoadsResponse = self._call(self._stub.GetLoads, shoal_pb2.GetLoadsRequest())
        return reply.loads

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _events(self, request: shoal_pb2.GenerateRequest, timeout_s: float | None) -> Iterator[Chunk | Completion]:
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            for reply in call:
                yield read_reply(reply)
        except grpc.RpcError as error:
            raise read_error(error, self.address) from None
        finally:
            call.cancel()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=10.0)
        except grpc.RpcError as error:
            raise read_error(error, self.address) from None
