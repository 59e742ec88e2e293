"""The handoff and what workers are asked: handles, control messages, Hello, tasks. Knows no thread and no tensor.

The peer is hostile, the driver is not: buffers are granted, posted and returned in legal order, and counted.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import msgpack

from shoal.config.worker import Pool, WorkerConfig
from shoal.decode_worker.spec import read_spec as read_decode_spec
from shoal.errors import Cancelled, InternalError, Unavailable
from shoal.kv_transfer import actions as act
from shoal.kv_transfer import wire
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.receiver import ReceiverMachine
from shoal.kv_transfer.rendezvous import PairStore
from shoal.kv_transfer.sender import SenderMachine
from shoal.model_files import open_model, write_random_model
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.pb.internal.v1 import worker_pb2
from shoal.prefill_worker.spec import read_spec as read_prefill_spec
from shoal.rpc.fingerprints import fingerprint_from_pb, fingerprint_to_pb
from shoal.rpc.parsing import read_message
from shoal.types import ModelShape
from tests.e2e.harness import make_config
from tests.fakes.transfer import FINGERPRINT, toy_handle, toy_plan
from tests.folders import temporary_folder
from tests.fuzz.draw import Draw
from tests.fuzz.router_targets import VISIBILITIES
from tests.fuzz.target import Target

PLAN = toy_plan(4, 6, 2)
ATTEMPTS = ("a", "b", "ended", "unknown", "")


def _handle(draw: Draw) -> bytes:
    if draw.chance(30):
        return draw.raw(200)
    values: list[Any] = msgpack.unpackb(toy_handle(draw.pick(ATTEMPTS), PLAN).encode())
    if draw.chance(60):
        part = draw.pick((values, values[1], values[2]))
        part[draw.below(len(part))] = draw.pick(
            (draw.integer() % (1 << 63), draw.text(), draw.raw(), None, True, 0.5, [1], {"a": 1})
        )
    return draw.damaged(msgpack.packb(values, use_bin_type=True), 40)


def call_handle(data: bytes) -> None:
    Handle.decode(data).check_against(toy_handle("a", PLAN))


HINTS: dict[str, Any] = {
    "attempt_id": lambda draw: draw.pick(ATTEMPTS),
    "n": lambda draw: draw.below(6),
    "entry": lambda draw: draw.below(4),
    "num_more": lambda draw: draw.pick((0, 0, 1, 1, 2, 3, 2**32 - 1)),
    "num_bytes": lambda draw: draw.pick((4, 6, 2, 5, 10, 10, 8, 12)),  # one entry, some together, and what no plan has
    "last_n": lambda draw: draw.below(6),
    "handle": _handle,
    "code": lambda draw: draw.pick(("Cancelled", "Unavailable", "InternalError", "ShoalError", "BodyTooLarge")),
}
Steps = list[tuple[int, Any]]  # what to do, and the message to read first if there is one


def _steps(kind: type, names: tuple[str, ...]) -> Callable[[Draw], Steps]:
    """A hostile peer's messages, and between them what this end may do next."""

    def make(draw: Draw) -> Steps:
        steps: Steps = []
        for _ in range(1 + draw.below(24)):
            message = kind()
            if draw.chance(65):
                name = draw.pick(names)
                getattr(message, name).SetInParent()
                draw.message(getattr(message, name), HINTS)
                if draw.chance(3):
                    message = kind.FromString(b"")
            steps.append((draw.byte(), message if message.ByteSize() else None))
        return steps

    return make


class _Buffers:
    """Counts what a machine holds, and checks that it frees each buffer once."""

    def __init__(self) -> None:
        self.wanted = 0
        self.granted = False
        self.held: set[int] = set()
        self.todo: list[Any] = []
        self.closed: Exception | None = None
        self.ended: list[str] = []

    def do(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.WantBuffer():
                    self.wanted += 1
                    assert self.wanted == 1, "two buffers were asked for at once"
                case act.ReturnBuffer():
                    assert self.granted
                    self.granted = False
                case act.Post() | act.Pack():
                    assert self.granted, "a buffer was used that had not been granted"
                    self.granted = False
                    self.held.add(action.n if isinstance(action, act.Post) else action.ticket)
                    self.todo.append(action)
                case act.Issue():
                    self.todo.append(action)
                case act.FreeBuffer():
                    self.held.remove(action.key)
                case act.Finish():
                    assert action.attempt_id not in self.ended, "an attempt ended twice"
                    self.ended.append(action.attempt_id)
                case act.ClosePair():
                    self.closed = action.error
                case act.Quarantine():
                    assert action.key in self.held


def call_receiver(steps: Steps) -> None:
    book = AttemptBook(lease_s=10.0, remember_s=100.0)
    for attempt in ("a", "b", "ended"):
        book.expect(toy_handle(attempt, PLAN), PLAN, 0.0)
    book.end("ended", 0.0)
    machine, buffers = ReceiverMachine(book, max_receives=2, max_joined_bytes=10), _Buffers()
    posted: list[act.Post] = []
    arrived: list[act.Post] = []
    for choice, message in steps:
        if buffers.closed is not None:
            break
        if message is not None:
            buffers.do(machine.on_message(message))
        if buffers.closed is not None:
            break
        if choice & 1 and buffers.wanted:
            buffers.wanted, buffers.granted = 0, True
            buffers.do(machine.granted())
        elif choice & 2 and buffers.todo:
            posted.append(buffers.todo.pop(0))
            buffers.do(machine.posted(posted[-1].n))
        elif choice & 4 and posted:
            arrived.append(posted.pop(0))
            buffers.do(machine.arrived(arrived[-1].n, arrived[-1].num_bytes))
        elif choice & 8 and arrived:
            one = arrived.pop(0)
            error = Unavailable("copy") if choice & 64 else None
            buffers.do(machine.unpacked(one.n, None if choice & 16 else [choice] * len(one.entries), error))
        elif choice & 32:
            buffers.do(machine.cancel("a", Cancelled("test")))
    buffers.do(machine.closed(Unavailable("closed")))
    for post in [*buffers.todo, *posted]:
        buffers.do(machine.failed(post.n))
    for post in arrived:
        buffers.do(machine.unpacked(post.n, None, None))
    assert not buffers.held and not machine.num_attempts, f"still held: {buffers.held}"


def call_sender(steps: Steps) -> None:
    machine, buffers = SenderMachine(window=3, lease_s=10.0, max_joined_bytes=10), _Buffers()
    for attempt in ("a", "b"):
        buffers.do(machine.open(attempt, b"handle", PLAN, 0.0))
        buffers.do(machine.entries_ready(attempt, range(3), 0.0))
    for choice, message in steps:
        if buffers.closed is not None:
            break
        if message is not None:
            buffers.do(machine.on_message(message, 1.0))
        if buffers.closed is not None:
            break
        if choice & 1 and buffers.wanted:
            buffers.wanted, buffers.granted = 0, True
            buffers.do(machine.granted())
        elif choice & 2 and buffers.todo:
            _return_one(machine, buffers, choice)
        elif choice & 4:
            buffers.do(machine.cancel("a", Cancelled("test")))
        elif choice & 8:
            buffers.do(machine.sweep(5.0 + (choice & 16)))
    buffers.do(machine.closed(Unavailable("closed")))
    while buffers.todo:
        _return_one(machine, buffers, 0, failed=True)
    assert not buffers.held and machine.is_idle, f"still held: {buffers.held}"


def _return_one(machine: SenderMachine, buffers: _Buffers, choice: int, failed: bool = False) -> None:
    action = buffers.todo.pop(0)
    if isinstance(action, act.Pack):
        buffers.do(machine.packed(action.ticket, None if failed or choice & 16 else [choice] * len(action.entries), 2.0))
        if failed:
            buffers.do(machine.closed(Unavailable("closed")))
    elif failed or choice & 32:
        buffers.do(machine.failed(action.ticket))
    else:
        buffers.do(machine.sent(action.ticket, action.num_bytes, 2.0))


def _hello(draw: Draw) -> bytes:
    hello = pb.Hello(worker_id="p", fingerprint=fingerprint_to_pb(FINGERPRINT))
    hints = {"dtype": lambda draw: draw.pick(("float32", "bfloat16", "int4"))}
    made = draw.message(hello, hints).SerializeToString()
    rendezvous = draw.message(pb.Rendezvous()).SerializeToString()
    return draw.damaged(made) if draw.chance(60) else draw.damaged(rendezvous)


def call_hello(data: bytes) -> None:
    hello, rendezvous = read_message(pb.Hello, data), read_message(pb.Rendezvous, data)
    with suppress(InternalError):  # the peer broke the protocol: the pair closes
        PairStore(lambda key, value: None, 0.0).heard(rendezvous.key, rendezvous.value)
    wire.check_fingerprints(fingerprint_from_pb(hello.fingerprint), FINGERPRINT)


@cache
def _worker() -> tuple[WorkerConfig, ModelShape]:
    folder = write_random_model(temporary_folder(), vocab_size=300)
    config = make_config(Pool.DECODE, folder)
    return config, open_model(str(folder)).config.shape


def _task(draw: Draw) -> tuple[type, bytes]:
    kind = draw.pick((worker_pb2.DecodeRequest, worker_pb2.DecodeRequest, worker_pb2.PrefillRequest))
    hints: dict[str, Any] = {
        "visibility": lambda draw: draw.pick(("full:boundary=1", "full:boundary=1", "speed:2:boundary=1", *VISIBILITIES)),
        "attempt_id": lambda draw: "a",
        "sampling": None,
        "priority": lambda draw: draw.pick(("low", "normal", "high")),
        "repetition_penalty": lambda draw: 1.0,
        "prompt_ids": lambda draw: draw.below(310),
        "max_tokens": lambda draw: 1 + draw.below(99),
        "num_children": lambda draw: draw.below(3),
        "num_prompt_tokens": lambda draw: draw.below(9),
        "top_p": lambda draw: 1.0,
    }
    return kind, draw.damaged(draw.message(kind(), hints).SerializeToString(), 5)


def call_task(given: tuple[type, bytes]) -> None:
    message: Any = read_message(*given)
    config, shape = _worker()
    if isinstance(message, worker_pb2.DecodeRequest):
        read_decode_spec(message, "attempt", config, shape)
    else:
        read_prefill_spec(message, config, shape, FINGERPRINT)


TARGETS = (
    Target("handle", 10, _handle, call_handle),
    Target("receiver", 15, _steps(pb.SenderMessage, ("open", "ready", "ready", "trailer", "end", "hello")), call_receiver),
    Target("sender", 15, _steps(pb.ReceiverMessage, ("accept", "go", "go", "skip", "ack", "reject", "welcome")), call_sender),
    Target("hello", 5, _hello, call_hello),
    Target("tasks", 10, _task, call_task),
)
