"""Which workers a router knows and when it says SERVING: lists, reconnects, epochs, static addresses, drain."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.config.router import RouterConfig
from shoal.model_files import open_model
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.app import Router
from shoal.rpc import Address, RpcServer, open_channel
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import FakeDecodeWorker, FakePrefillWorker, Wire, fingerprint, until

CODE = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(c: Cluster) -> list[int]:
    stub = health_pb2_grpc.HealthStub(c.channel)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=service)) for service in ("", "shoal.v1.Shoal")]
    return [answer.status for answer in answers]


async def health_becomes(c: Cluster, status: int) -> None:
    async with asyncio.timeout(2):
        while await health(c) != [status, status]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_health_follows_the_pairs() -> None:
    async with Cluster(1, 2) as c:
        await health_becomes(c, SERVING)
        c.board.set(c.prefill[0], "draining")
        await health_becomes(c, NOT_SERVING)
        code, words = await c.status(request())
        assert code is CODE.UNAVAILABLE and "prefill-0 not ready" in words
        assert (await c.complete(request(ids=[3], max_tokens=1))).completion_tokens == 1  # needs no prefill
        c.board.set(c.prefill[0], "ready")
        c.board.set(c.decode[0], "dead")
        await health_becomes(c, SERVING)
        info = await c.stub.GetServerInfo(shoal_pb2.GetServerInfoRequest())
        assert {(w.worker_id, w.state) for w in info.workers} == {
            ("prefill-0", "ready"), ("decode-0", "dead"), ("decode-1", "ready"),
        }  # fmt: skip
        assert (await c.complete(request(max_tokens=1))).transfer.decode_worker == "decode-1"


async def test_nobody_there_is_told_in_words() -> None:
    async with Cluster(0, 0) as c:
        assert await health(c) == [NOT_SERVING, NOT_SERVING]
        code, words = await c.status(request())
        assert code is CODE.UNAVAILABLE and "no decode worker is known" in words
        info = await c.stub.GetModelInfo(shoal_pb2.GetModelInfoRequest())
        assert (info.served_model_name, info.num_layers, info.vocab_size) == ("smollm2-135m", 30, 49152)


async def test_differing_workers_are_not_paired_and_the_difference_is_named() -> None:
    async with Cluster(1, 1) as c:
        revision = open_model("smollm2-135m").revision
        c.decode[0].description.fingerprint.CopyFrom(fingerprint(revision, dtype="bfloat16"))
        c.decode[0].description.epoch = 2
        c.board.publish()
        await health_becomes(c, NOT_SERVING)
        code, words = await c.status(request())
        assert code is CODE.UNAVAILABLE and "dtype: bfloat16 != float32" in words


async def test_workers_of_another_model_get_no_requests() -> None:
    async with Cluster(1, 1, revision="0123456789abcdef", num_usable=0) as c:
        await asyncio.sleep(0.1)
        assert not c.router.registry.workers
        assert (await c.status(request()))[0] is CODE.UNAVAILABLE


async def test_a_visibility_nobody_holds_is_unavailable_with_words() -> None:
    async with Cluster(1, 1) as c:
        del c.prefill[0].description.allowed_visibilities[:]
        c.prefill[0].description.allowed_visibilities.append("speed:22")
        c.prefill[0].description.epoch = 2
        c.board.publish()
        await until(lambda: any(w.epoch == 2 for w in c.router.registry.workers))
        assert (await c.complete(request(max_tokens=1, visibility="speed:22"))).completion_tokens == 1
        code, words = await c.status(request(visibility="full"))
        assert code is CODE.UNAVAILABLE and "prefill-0 does not allow full" in words


async def test_a_new_epoch_replaces_the_old_one_and_ends_what_ran_on_it() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].hang = True
        task = asyncio.create_task(c.status(request()))
        await c.decode[0].busy()
        c.decode[0].description.epoch = 2
        c.board.publish()
        code, words = await asyncio.wait_for(task, 2)
        assert code is CODE.UNAVAILABLE and "decode-0 was restarted" in words
        c.decode[0].hang = False
        assert (await c.complete(request(max_tokens=1))).completion_tokens == 1
        assert [w.epoch for w in c.router.registry.pool("decode")] == [2]


async def test_a_worker_that_left_the_list_finishes_what_it_runs() -> None:
    async with Cluster(1, 2, load_interval_s=0.02) as c:
        c.decode[0].delay_s = c.decode[1].delay_s = 0.02
        task = asyncio.create_task(c.complete(request(max_tokens=10)))
        await until(lambda: any(worker.num_sent for worker in c.decode))
        busy = next(worker for worker in c.decode if worker.num_sent)
        del c.board.states[busy]
        c.board.publish()
        assert (await task).completion_tokens == 10
        assert (await c.complete(request(max_tokens=1))).transfer.decode_worker != busy.worker_id


async def test_loads_are_the_workers_own_reports() -> None:
    async with Cluster(1, 1) as c:
        c.decode[0].outstanding = 77
        reply = await c.stub.GetLoads(shoal_pb2.GetLoadsRequest())
        assert {(load.worker_id, load.pool, load.outstanding_token_layers) for load in reply.loads} == {
            ("prefill-0", "prefill", 0), ("decode-0", "decode", 77),
        }  # fmt: skip
        await c.decode[0].stop()
        reply = await c.stub.GetLoads(shoal_pb2.GetLoadsRequest())
        assert [load.worker_id for load in reply.loads] == ["prefill-0"]


class Controller(controller_pb2_grpc.ControllerServicer):
    def __init__(self, endpoints: list[controller_pb2.Endpoint]) -> None:
        self.endpoints = endpoints
        self.watchers: list[str] = []
        self.server = RpcServer()

    async def WatchEndpoints(self, request: Any, context: Any) -> AsyncIterator[controller_pb2.Endpoints]:
        self.watchers.append(request.router_id)
        yield controller_pb2.Endpoints(version=1, endpoints=self.endpoints)
        await asyncio.Event().wait()

    async def start(self, address: Address) -> Address:
        service = controller_pb2.DESCRIPTOR.services_by_name["Controller"]
        self.server.add(controller_pb2_grpc.add_ControllerServicer_to_server, self, service)
        return await self.server.start(address)


async def test_the_last_list_stays_in_force_while_the_controller_is_away_and_a_new_one_is_taken() -> None:
    wire, revision = Wire(), open_model("smollm2-135m").revision
    prefill, decode = FakePrefillWorker(wire, revision, "prefill-0"), FakeDecodeWorker(wire, revision, "decode-0")
    later = FakeDecodeWorker(wire, revision, "decode-1")
    for worker in (prefill, decode, later):
        await worker.start()

    def listed(*workers: Any) -> list[controller_pb2.Endpoint]:
        return [controller_pb2.Endpoint(worker=w.description, state="ready") for w in workers]

    first = Controller(listed(prefill, decode))
    address = await first.start(Address("127.0.0.1", 0))
    router = Router(RouterConfig(model="smollm2-135m", listen="127.0.0.1:0", controller=str(address), local_prefill_tokens=0))
    async with router, open_channel(str(await router.start())) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)

        async def ask() -> str:
            replies = [reply async for reply in stub.Generate(request(max_tokens=1))]
            return str(replies[-1].complete.transfer.decode_worker)

        await until(lambda: router.registry.can_serve)
        assert await ask() == "decode-0"
        await first.server.stop()
        assert await ask() == "decode-0"
        second = Controller(listed(prefill, later))
        await second.start(address)
        await until(lambda: [w.worker_id for w in router.registry.pool("decode")] == ["decode-1"], timeout_s=10)
        assert await ask() == "decode-1"
        assert first.watchers == second.watchers and first.watchers[0].startswith("router-")
        await second.server.stop()
    for worker in (prefill, decode, later):
        await worker.stop()


async def test_a_fixed_list_of_workers_needs_no_controller() -> None:
    wire, revision = Wire(), open_model("smollm2-135m").revision
    prefill, decode = FakePrefillWorker(wire, revision, "prefill-0"), FakeDecodeWorker(wire, revision, "decode-0")
    await prefill.start()
    await decode.start()
    workers = (f"prefill={prefill.description.address}", f"decode={decode.description.address}")
    router = Router(RouterConfig(model="smollm2-135m", listen="127.0.0.1:0", workers=workers, local_prefill_tokens=0))
    async with router, open_channel(str(await router.start())) as channel:
        await until(lambda: router.registry.can_serve)
        replies = [r async for r in shoal_pb2_grpc.ShoalStub(channel).Generate(request(max_tokens=2))]
        assert list(replies[0].complete.output_ids) == [100, 101]
    await prefill.stop()
    await decode.stop()


async def test_stopping_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    async with Cluster() as c:
        c.decode[0].delay_s = 0.02
        task = asyncio.create_task(c.complete(request(max_tokens=10)))
        await until(lambda: c.decode[0].num_sent > 0)
        stopping = asyncio.create_task(c.router.stop(5.0))
        await asyncio.sleep(0.05)
        assert (await c.status(request()))[0] in (CODE.UNAVAILABLE, CODE.CANCELLED)
        assert (await task).completion_tokens == 10
        await asyncio.wait_for(stopping, 2)


async def test_reflection_lists_the_service() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with Cluster(0, 0) as c:
        stub = reflection_pb2_grpc.ServerReflectionStub(c.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        assert {s.name for s in answer.list_services_response.service} >= {"shoal.v1.Shoal", "grpc.health.v1.Health"}
