"""The synchronous client. Thin: builds a request, makes the call, hands out typed values."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from shoal.client.connection import CALL_TIMEOUT_S, Attempts, Retry, bearer
from shoal.client.requests import Options, Prompt, Text, build_request, build_score, build_tokenize, check_one, read_error
from shoal.client.types import Chunk, Completion, Image, Score, only_one, read_reply
from shoal.errors import InternalError
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_sync_channel


class Client:
    """A connection to a router. Thread-safe.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("Why do fish swim in shoals?", visibility="speed:22"):
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)
            else:
                print("\\n", event.finish_reason, event.timings.ttft_ms, event.transfer.payload_bytes)

    Calls raise the classes of shoal.errors; `timeout_s` is the deadline of a call, retries included.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        retry: Retry = Retry(),  # noqa: B008  (frozen)
    ) -> None:
        """`credentials` (see `tls_credentials`) turn TLS on; `token` goes with every call."""
        self.address = address
        self._retry, self._metadata = retry, bearer(token)
        self._channel = open_sync_channel(address, credentials)
        self._stub: Any = shoal_pb2_grpc.ShoalStub(self._channel)

    def generate(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Chunk | Completion]:
        """Stream an answer: chunks as they come, and one Completion for each of n. Leaving the loop early cancels the request."""
        return self._events(build_request(prompt, options, stream=True), timeout_s)

    def complete(self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer at once. Raises InvalidRequest for n > 1."""
        check_one(options)
        return only_one(self.complete_all(prompt, timeout_s=timeout_s, **options))

    def complete_all(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> tuple[Completion, ...]:
        """All n answers, by index."""
        events = self._events(build_request(prompt, options, stream=False), timeout_s)
        return tuple(sorted((e for e in events if isinstance(e, Completion)), key=lambda done: done.index))

    def score(
        self,
        prompt: Text,
        continuation: Text,
        *,
        logprobs: int = 0,
        visibility: str | None = None,
        request_id: str = "",
        model: str = "",
        images: Sequence[Image] = (),
        timeout_s: float | None = None,
    ) -> Score:
        """How likely `continuation` is after `prompt`, each a text or token ids."""
        request = build_score(
            prompt, continuation, logprobs=logprobs, visibility=visibility, request_id=request_id, model=model, images=images
        )  # fmt: skip
        return Score.read(self._call(self._stub.Score, request, timeout_s))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        add_special_tokens: bool | None = None,
        images: Sequence[Image] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """Ids of a prompt as `generate` would run it; of a raw text also without the tokenizer's own special tokens."""
        request = build_tokenize(prompt, raw=raw, add_special_tokens=add_special_tokens, images=images)
        return tuple((self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        request = shoal_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((self._call(self._stub.Detokenize, request)).text)

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
        attempts = Attempts(self._retry, timeout_s)
        while True:
            started = False
            call = self._stub.Generate(request, timeout=attempts.time_left_s, metadata=self._metadata)
            try:
                for reply in call:
                    started = True
                    yield read_reply(reply)
                if not started:
                    raise InternalError("the server ended the stream without an answer")
                return
            except grpc.RpcError as error:
                pause_s = attempts.pause_s(read_error(error, self.address), started=started)
            finally:
                call.cancel()
            time.sleep(pause_s)

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        attempts = Attempts(self._retry, timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.time_left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.pause_s(read_error(error, self.address), started=False))
