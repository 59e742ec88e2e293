"""The controller's autoscaling over workers that report by gRPC: what it orders, what keeps it from that, what it tells."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shoal.cli.autoscale import to_json, to_line
from shoal.config.autoscale import AutoscaleConfig
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.autoscaler import Autoscaler
from shoal.controller.controller import Controller
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.machines import FixedMachines, Held
from shoal.controller.names import ActorName, Slot
from shoal.controller.pools import PoolChange
from shoal.controller.servicer import ControllerServicer
from shoal.errors import AlreadyExists, CapacityExceeded, InvalidConfig, ShoalError, Unavailable, Unsupported
from shoal.pb.internal.v1 import controller_pb2, worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.rpc import Address, ClusterLink, RpcServer


class Reporter(worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker that has nothing but a report."""

    def __init__(self) -> None:
        load = shoal_pb2.WorkerLoad(max_reservations=4, num_total_blocks=100)
        self.report = worker_pb2.WorkReport(load=load)

    async def GetWork(self, request: Any, context: Any) -> worker_pb2.WorkReport:
        return self.report


@dataclass
class Pools:
    """Stands for the controller: takes orders, or refuses as told."""

    num: int = 1
    room: int = 99
    refuses: ShoalError | None = None
    ordered: list[int] = field(default_factory=list)

    def set_pool_sizes(
        self, sizes: Mapping[Pool, int], *, drain_s: float | None = None, allow_pending: bool = False
    ) -> PoolChange:
        if self.refuses is not None:
            raise self.refuses
        size = sizes[Pool.DECODE]
        if size > self.room and not allow_pending:
            raise CapacityExceeded(f"{size} do not fit")
        self.ordered.append(size)
        self.num = size
        return PoolChange()

    def num_workers(self, pool: Pool) -> int:
        return self.num

    def held(self, pool: Pool) -> Held:
        return Held(frozenset(), 0)


class Machines(FixedMachines):
    """Brings machines, up to some number, or fails."""

    may_come = True

    def __init__(self) -> None:
        self.limit: int | None = None
        self.fails = False
        self.num_settled = 0

    async def most(self, pool: Pool) -> int | None:
        return self.limit

    async def settle(self, held: Mapping[Pool, Held]) -> None:
        self.num_settled += 1
        if self.fails:
            raise Unavailable("no answer")


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[tuple[Autoscaler, Pools, Reporter, Machines]]:
    worker, pools, board, machines = Reporter(), Pools(), EndpointBoard(), Machines()
    server = RpcServer()
    server.add(worker_pb2_grpc.add_DecodeWorkerServicer_to_server, worker, worker_pb2.DESCRIPTOR.services_by_name["DecodeWorker"])
    async with server:
        address = str(await server.start(Address("127.0.0.1", 0)))
        described = worker_pb2.WorkerDescription(worker_id="decode-0", pool="decode", epoch=1, address=address)
        board.set(ActorName(Slot(Pool.DECODE, 0), 1), EndpointState.READY, described)
        flat = {"autoscale_decode": "1-4"} | {name: settings.pop(name) for name in list(settings) if name.startswith("autoscale")}
        own = AutoscaleConfig(**({"up_cooldown_s": 0.0, "down_cooldown_s": 0.0, "start_s": 0.0} | settings))
        config = ServeConfig(autoscale=own, **flat)
        yield Autoscaler(config, pools, board, ClusterLink(), machines), pools, worker, machines


async def decided(scaler: Autoscaler) -> controller_pb2.ScalingDecision:
    await scaler.look()
    return [decision.to_pb() async for decision in scaler.decisions.watch(follow=False)][-1]


async def test_it_grows_by_rows_and_shrinks_when_they_are_gone() -> None:
    async with bench() as (scaler, pools, worker, machines):
        worker.report.load.num_reservations = worker.report.load.num_running_reqs = 4
        grown = await decided(scaler)
        assert (grown.decision, list(grown.because), pools.ordered) == ("grow", ["room"], [2])
        assert grown.seen["rows"] == 4 and grown.seen["full"] == 1 and grown.needed_for_room == 2
        worker.report.load.num_reservations = worker.report.load.num_running_reqs = 0
        shrunk = await decided(scaler)
        assert (shrunk.decision, shrunk.num_wanted, pools.ordered, machines.num_settled) == ("shrink", 1, [2, 1], 2)
        words, told = to_line(grown), to_json(grown)
        assert "decode: grow 1 → 2 (room) · needs 2: work 1, wait 1, room 2 · bounds 1-4 · " in words and "rows=4" in words
        assert told["needed_for"] == {"work": 1, "wait": 1, "room": 2} and json.loads(json.dumps(told)) == told


async def test_it_grows_by_what_arrives_before_anything_is_full() -> None:
    async with bench(tpot_s=0.05) as (scaler, pools, worker, _):
        worker.report.answers_by_size.extend([0] * 7 + [20])
        worker.report.answer_tokens, worker.report.num_steps, worker.report.step_reqs = 20 * 100, 100, 200
        worker.report.step_s = 100 * 0.045
        assert (await decided(scaler)).decision == "hold"  # an unknown time: sizes and pace, but no rate
        worker.report.num_arrived_reqs = 3
        await asyncio.sleep(0.05)
        found = await decided(scaler)
        assert found.decision == "grow" and found.because[0] == "work" and found.seen["answer_tokens"] == pytest.approx(100)
        assert found.seen["work"] > 1 and pools.num > 1


async def test_a_dry_run_decides_and_changes_nothing() -> None:
    async with bench(autoscale_dry_run=True) as (scaler, pools, worker, machines):
        worker.report.load.num_reservations = 4
        found = await decided(scaler)
        assert (found.decision, found.num_workers, found.num_wanted, found.dry_run) == ("grow", 1, 2, True)
        assert ", dry run · needs 2" in to_line(found)
        assert not pools.ordered and not machines.num_settled


async def test_what_keeps_it_is_said() -> None:
    async with bench() as (scaler, pools, worker, machines):
        worker.report.load.num_reservations = worker.report.load.num_waiting_reqs = 4
        pools.refuses = AlreadyExists("a rolling restart is under way; scale when it is done")
        found = await decided(scaler)
        assert (found.decision, found.because[-1]) == ("hold", "restarting") and "rolling restart" in found.message
        pools.refuses, machines.limit = None, 1
        found = await decided(scaler)
        assert (found.decision, found.because[-1], found.message) == ("hold", "machines", "no more than 1 machines")
        machines.limit, machines.fails = None, True  # ordered all the same; machines are asked for at each look
        assert (await decided(scaler)).decision == "grow" and pools.ordered == [3]  # four run and four wait, of four each
        worker.report.load.num_reservations = 0
        pools.num = 4  # somebody else's order: cool-downs begin anew, nothing is undone at once
        before = scaler._scaled[Pool.DECODE].state
        await scaler.look()
        assert scaler._scaled[Pool.DECODE].state.last_up_s > before.last_up_s


async def test_without_machines_to_come_it_takes_what_room_there_is() -> None:
    async with bench() as (scaler, pools, worker, machines):
        object.__setattr__(machines, "may_come", False)
        worker.report.load.num_reservations = 4
        pools.room = 1
        found = await decided(scaler)
        assert (found.decision, found.because[-1], found.message) == ("hold", "no_room", "2 do not fit")
        pools.num, pools.room = 2, 3
        worker.report.load.num_waiting_reqs = 8  # it is full, and as many wait as fill two more: four would be needed
        found = await decided(scaler)
        assert (found.decision, found.num_wanted) == ("grow", 3)


async def test_a_pool_that_does_not_report_is_left_alone() -> None:
    async with bench(interval_s=0.2) as (scaler, pools, _, _machines):
        pools.num = 3
        scaler._board.set(ActorName(Slot(Pool.DECODE, 0), 1), EndpointState.STARTING)
        found = await decided(scaler)
        assert (found.decision, list(found.because), found.num_wanted) == ("hold", ["no_report"], 3)
        pools.num = 0  # but never fewer than the least
        assert (await decided(scaler)).num_wanted == 1


async def test_decisions_can_be_followed_and_a_cluster_that_does_not_scale_says_so() -> None:
    async with bench(interval_s=0.05) as (scaler, _, worker, _machines):
        servicer = ControllerServicer(cast(Controller, type("C", (), {"autoscaler": scaler})()))
        running = asyncio.create_task(scaler.run())
        seen = []
        async with asyncio.timeout(20):
            async for decision in servicer.WatchScaling(controller_pb2.WatchScalingRequest(follow=True), cast(Any, None)):
                seen.append(decision.decision)
                worker.report.load.num_reservations = 4
                if "grow" in seen:
                    break
        running.cancel()
        still = ControllerServicer(cast(Controller, type("C", (), {"autoscaler": None})()))
        with pytest.raises(Unsupported, match="start it with --autoscale-prefill"):
            async for _ in still.WatchScaling(controller_pb2.WatchScalingRequest(), cast(Any, None)):
                pass


def test_settings_that_make_no_sense_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"interval_s": 0.0}, "interval_s must be a number of seconds greater than 0"),
        ({"down_cooldown_s": -1.0}, "down_cooldown_s must be a number of seconds, 0 or more"),
        ({"start_s": float("nan")}, "start_s must be"),
        ({"target_utilisation": 1.5}, "a share above 0"),
        ({"hysteresis": 1.0}, "below 1"),
        ({"decode_group": "prefill"}, "pools scale apart"),
        ({"raycluster": "Shoal!"}, "no name that Kubernetes takes"),
        ({"kubernetes_api": "10.0.0.1"}, "should be a URL"),
        ({"kubernetes_ca_file": "/ca"}, "go with autoscale.kubernetes_api"),
    ]
    for values, words in cases:
        with pytest.raises(InvalidConfig, match=words):
            AutoscaleConfig(**values)
