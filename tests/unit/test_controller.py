import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from shoal.config.worker import Pool
from shoal.controller.backoff import RestartPolicy
from shoal.controller.controller import Controller
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.events import Event, EventWriter
from shoal.controller.health import wait_until_ill
from shoal.controller.keeper import SlotKeeper, WorkerGivenUp
from shoal.controller.names import ActorName, Slot
from shoal.controller.ray_cluster import ActorHandle
from shoal.controller.servicer import ControllerServicer
from shoal.errors import InvalidConfig, Unavailable
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc, worker_pb2
from shoal.rpc import Address, RpcServer, open_channel

SLOT = Slot(Pool.PREFILL, 0)


def test_names_read_back_and_foreign_ones_do_not() -> None:
    name = ActorName(Slot(Pool.DECODE, 12), 7)
    assert str(name) == "shoal-decode-12-e7" and ActorName.parse(str(name)) == name
    assert name.next() == ActorName(Slot(Pool.DECODE, 12), 8)
    assert [ActorName.parse(text) for text in ("", "shoal-router-0-e1", "shoal-decode-0", "xshoal-decode-0-e1")] == [None] * 4


def test_back_off_doubles_up_to_a_limit_and_then_gives_up() -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=4, max_failures=6)
    assert [policy.delay_s(count) for count in range(7)] == [0, 1, 2, 4, 4, 4, None]
    assert policy.is_hopeless(InvalidConfig("no such model")) and not policy.is_hopeless(Unavailable("it died"))


def test_events_cross_as_lines_and_a_reader_that_left_is_no_failure() -> None:
    stream = io.StringIO()
    writer = EventWriter(stream)
    writer.emit("loading", "prefill-0", done=1, total=4)
    assert Event.decode(stream.getvalue()) == Event("loading", "prefill-0", "", {"done": 1, "total": 4})
    stream.close()
    writer.emit("ready")
    for line in ("", "[]", '{"worker": "a"}'):
        with pytest.raises(ValueError):
            Event.decode(line)


def servicer(board: EndpointBoard) -> ControllerServicer:
    """Of a controller that has nothing but a board."""
    return ControllerServicer(cast(Controller, SimpleNamespace(board=board)))


async def test_watchers_get_the_whole_list_at_once_and_the_newest_after_changes() -> None:
    board = EndpointBoard()
    board.set(ActorName(SLOT, 1), EndpointState.STARTING)
    server = RpcServer()
    service = controller_pb2.DESCRIPTOR.services_by_name["Controller"]
    server.add(controller_pb2_grpc.add_ControllerServicer_to_server, servicer(board), service)
    async with server, open_channel(str(await server.start(Address("127.0.0.1", 0)))) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        stream = stub.WatchEndpoints(controller_pb2.WatchEndpointsRequest(router_id="r"))
        first = await stream.read()
        assert [(e.worker.worker_id, e.state) for e in first.endpoints] == [("prefill-0", "starting")]
        described = worker_pb2.WorkerDescription(worker_id="prefill-0", pool="prefill", epoch=1, address="h:1")
        board.set(ActorName(SLOT, 1), EndpointState.READY, described)
        board.set(ActorName(SLOT, 1), EndpointState.DRAINING)
        second = await stream.read()
        assert [(e.worker.address, e.state) for e in second.endpoints] == [("h:1", "draining")]
        assert second.version == first.version + 2
        board.set(ActorName(SLOT, 2), EndpointState.STARTING)
        third = await stream.read()
        assert [(e.worker.epoch, e.worker.address) for e in third.endpoints] == [(2, "")]
        stream.cancel()


async def test_silence_and_a_long_not_serving_are_noticed() -> None:
    async with RpcServer() as server:
        address = str(await server.start(Address("127.0.0.1", 0)))
        assert await asyncio.wait_for(wait_until_ill(address, 0.2), 5) == "NOT_SERVING for 0.2 s"
        await server.set_serving(True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_until_ill(address, 0.2), 0.6)
        watch = asyncio.create_task(wait_until_ill(address, 0.4))
        await asyncio.sleep(0.15)
        time.sleep(1.0)  # noqa: ASYNC251  # this process stands still, as one that was stopped: no worker's fault
        await asyncio.sleep(0.3)
        assert not watch.done()
        watch.cancel()
        # a listener that accepts and never speaks, as a stopped process does
        mute = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
        async with mute:
            host, port = mute.sockets[0].getsockname()
            assert await asyncio.wait_for(wait_until_ill(f"{host}:{port}", 0.2), 5) == "no answer to a health check for 0.2 s"
        mute.close()


class ScriptedActor:
    """Stands for an actor: a list of what its start tells, or the error it raises; it dies when told to."""

    def __init__(self, name: ActorName, tells: list[dict[str, Any]] | Exception) -> None:
        self.name, self.tells, self.machine = name, tells, "here"
        self.died = asyncio.Event()
        self.calls: list[str] = []

    async def start(self) -> AsyncIterator[dict[str, Any]]:
        if isinstance(self.tells, Exception):
            raise self.tells
        for told in self.tells:
            yield told

    async def wait_for_death(self) -> str:
        await self.died.wait()
        return "killed"

    async def stop(self, grace_s: float) -> None:
        self.calls.append(f"stop {grace_s:g}")

    def kill(self) -> None:
        self.calls.append("kill")


def ready(address: str) -> list[dict[str, Any]]:
    description = worker_pb2.WorkerDescription(worker_id="prefill-0", pool="prefill", address=address)
    return [{"loading": [1, 4]}, {"ready": description.SerializeToString().hex()}]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110  (the state of several objects, not one event)
            await asyncio.sleep(0.005)


class Bench:
    """One keeper over scripted actors."""

    def __init__(self, script: Callable[[int], list[dict[str, Any]] | Exception]) -> None:
        self.actors: list[ScriptedActor] = []
        self.board = EndpointBoard()
        self.events = io.StringIO()

        def spawn(name: ActorName) -> ActorHandle:
            self.actors.append(ScriptedActor(name, script(len(self.actors))))
            return cast(ActorHandle, self.actors[-1])

        self.keeper = SlotKeeper(
            SLOT,
            first_epoch=5,
            spawn=spawn,
            board=self.board,
            events=EventWriter(self.events),
            policy=RestartPolicy(first_delay_s=0.001, max_delay_s=0.002, max_failures=3),
            start_timeout_s=5,
            hang_timeout_s=0.2,
        )

    @property
    def kinds(self) -> list[str]:
        return [Event.decode(line).kind for line in self.events.getvalue().splitlines()]


async def test_a_dead_worker_is_replaced_with_a_new_epoch_and_its_process_is_ended() -> None:
    async with RpcServer() as server:
        address = str(await server.start(Address("127.0.0.1", 0)))
        await server.set_serving(True)
        bench = Bench(lambda _: ready(address))
        running = asyncio.create_task(bench.keeper.run())
        await asyncio.wait_for(bench.keeper.ready.wait(), 5)
        bench.actors[0].died.set()
        await until(lambda: len(bench.actors) == 2 and bench.keeper.ready.is_set())
        assert [actor.name.epoch for actor in bench.actors] == [5, 6]
        assert bench.actors[0].calls == ["kill"]
        assert bench.board.snapshot.endpoints[0].state == "ready"
        running.cancel()
        await bench.keeper.stop(1.5)
        assert bench.actors[1].calls == ["stop 1.5", "kill"]
        assert bench.kinds == ["starting", "loading", "ready", "dead", "starting", "loading", "ready"]


async def test_a_worker_that_does_not_answer_is_killed_and_replaced() -> None:
    bench = Bench(lambda _: ready("127.0.0.1:1"))  # nothing listens there
    running = asyncio.create_task(bench.keeper.run())
    await until(lambda: len(bench.actors) == 2)
    running.cancel()
    assert bench.actors[0].calls == ["kill"]


async def test_crashes_at_start_are_repeated_a_few_times_then_given_up() -> None:
    bench = Bench(lambda _: Unavailable("exit code 3"))
    with pytest.raises(WorkerGivenUp, match=r"prefill-0 cannot start \(3 tries\): exit code 3"):
        await asyncio.wait_for(bench.keeper.run(), 5)
    assert [actor.calls for actor in bench.actors] == [["kill"]] * 3


async def test_a_hopeless_start_is_not_repeated() -> None:
    bench = Bench(lambda _: [{"failed": "InvalidConfig", "message": "model 'bad' is unknown"}])
    with pytest.raises(WorkerGivenUp, match="prefill-0 cannot start: model 'bad' is unknown"):
        await asyncio.wait_for(bench.keeper.run(), 5)
    assert len(bench.actors) == 1 and bench.kinds == ["starting", "dead"]


async def test_an_adopted_worker_is_kept_and_its_epoch_goes_on() -> None:
    async with RpcServer() as server:
        address = str(await server.start(Address("127.0.0.1", 0)))
        await server.set_serving(True)
        bench = Bench(lambda _: ready(address))
        found = ScriptedActor(ActorName(SLOT, 3), [])
        description = worker_pb2.WorkerDescription(worker_id="prefill-0", pool="prefill", epoch=3, address=address)
        bench.keeper.adopt(cast(ActorHandle, found), description)
        running = asyncio.create_task(bench.keeper.run())
        await asyncio.sleep(0.05)
        assert bench.actors == [] and bench.board.ready("prefill") == [description]
        found.died.set()
        await until(lambda: len(bench.actors) == 1)
        assert bench.actors[0].name.epoch == 4
        running.cancel()


async def test_a_controller_that_goes_away_ends_its_streams() -> None:
    server = RpcServer()
    service = controller_pb2.DESCRIPTOR.services_by_name["Controller"]
    server.add(controller_pb2_grpc.add_ControllerServicer_to_server, servicer(EndpointBoard()), service)
    async with open_channel(str(await server.start(Address("127.0.0.1", 0)))) as channel:
        stream = controller_pb2_grpc.ControllerStub(channel).WatchEndpoints(controller_pb2.WatchEndpointsRequest())
        assert (await stream.read()).version == 0
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
