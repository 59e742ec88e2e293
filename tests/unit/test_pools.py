"""The pools' keepers: what a change of size starts and drains, what a rolling restart does in which order, what is noted."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.backoff import RestartPolicy
from shoal.controller.endpoints import EndpointBoard
from shoal.controller.events import Event, EventWriter
from shoal.controller.keeper import SlotKeeper, WorkerGivenUp
from shoal.controller.names import ActorName, Slot
from shoal.controller.pools import Pools
from shoal.controller.ray_cluster import ActorHandle
from shoal.controller.rollout import RollingRestart
from shoal.controller.room import check_room, check_size
from shoal.controller.sizes import SizeBook
from shoal.errors import CapacityExceeded, InvalidConfig
from shoal.pb.internal.v1 import worker_pb2
from shoal.rpc import Address, RpcServer


class Actor:
    """Ready at once, or never; a drain takes a moment."""

    def __init__(self, name: ActorName, address: str, *, fails: bool) -> None:
        self.name, self.address, self.fails, self.machine = name, address, fails, str(name.slot)

    async def start(self) -> AsyncIterator[dict[str, Any]]:
        if self.fails:
            yield {"failed": "InvalidConfig", "message": "no such model"}
        slot = self.name.slot
        described = worker_pb2.WorkerDescription(
            worker_id=slot.worker_id, pool=slot.pool, epoch=self.name.epoch, address=self.address
        )
        yield {"ready": described.SerializeToString().hex()}

    async def wait_for_death(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self, grace_s: float) -> None:
        await asyncio.sleep(0.01)

    def kill(self) -> None:
        """Nothing to end."""


class Bench:
    """Pools over such actors; `told` is every event as "kind worker"."""

    def __init__(self, address: str, fails: Callable[[ActorName], bool] = lambda _: False) -> None:
        self.board, self._stream = EndpointBoard(), io.StringIO()
        self.most = 0  # workers that took requests at once

        def spawn(name: ActorName) -> ActorHandle:
            return cast(ActorHandle, Actor(name, address, fails=fails(name)))

        def make(slot: Slot, first_epoch: int) -> SlotKeeper:
            return SlotKeeper(
                slot, first_epoch=first_epoch, spawn=spawn, board=self.board, events=EventWriter(self._stream),
                policy=RestartPolicy(), start_timeout_s=5, hang_timeout_s=5,
            )  # fmt: skip

        self.pools = Pools(make, 7)

    async def warm(self, keepers: Sequence[SlotKeeper]) -> None:
        await self.pools.filled(keepers)

    @property
    def told(self) -> list[str]:
        events = [Event.decode(line) for line in self._stream.getvalue().splitlines()]
        return [f"{event.kind} {event.worker}" for event in events if event.kind != "starting"]

    def slots(self, pool: Pool) -> dict[str, int]:
        return dict(keeper.worker for keeper in self.pools.keepers(pool))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Somebody who says SERVING."""
    async with RpcServer() as server:
        bound = str(await server.start(Address("127.0.0.1", 0)))
        await server.set_serving(True)
        yield bound


async def test_sizes_take_the_lowest_free_slots_and_give_up_the_highest(address: str) -> None:
    bench = Bench(address)
    change = bench.pools.set_size(Pool.DECODE, 3, 0.0)
    await bench.pools.filled(change.started)
    assert bench.slots(Pool.DECODE) == {"decode-0": 7, "decode-1": 7, "decode-2": 7} and not change.retired
    assert bench.pools.preview(Pool.DECODE, 1) == ([], ["decode-1", "decode-2"])
    change = bench.pools.set_size(Pool.DECODE, 1, 0.0)
    assert [keeper.slot.worker_id for keeper in change.retired] == ["decode-1", "decode-2"]
    assert bench.pools.preview(Pool.DECODE, 2) == (["decode-3"], [])  # the others still drain
    await bench.pools.emptied(change.retired)
    assert [e.worker.worker_id for e in bench.board.snapshot.endpoints] == ["decode-0"]
    await bench.pools.filled(bench.pools.set_size(Pool.DECODE, 2, 0.0).started)
    assert bench.slots(Pool.DECODE) == {"decode-0": 7, "decode-1": 8}  # an epoch is never used twice
    await bench.pools.close(0.0)


@pytest.mark.parametrize(("surge", "told"), [
    (1, ["ready decode-2", "draining decode-0", "gone decode-0", "ready decode-0", "draining decode-1", "gone decode-1"]),
    (0, ["draining decode-0", "gone decode-0", "ready decode-0", "draining decode-1", "gone decode-1", "ready decode-1"]),
    (2, ["ready decode-2", "ready decode-3", "draining decode-0", "draining decode-1", "gone decode-0", "gone decode-1"]),
])  # fmt: skip
async def test_a_rolling_restart_replaces_workers_in_order(address: str, surge: int, told: list[str]) -> None:
    bench = Bench(address)
    await bench.pools.filled(bench.pools.set_size(Pool.DECODE, 2, 0.0).started)
    old, before = set(bench.pools.keepers()), len(bench.told)
    await RollingRestart((Pool.DECODE,), surge, 0.0).run(bench.pools, bench.warm)
    assert bench.told[before:] == told
    assert len(bench.pools.keepers()) == 2 and not old & set(bench.pools.keepers())
    await bench.pools.close(0.0)


async def test_a_successor_that_cannot_start_stops_the_restart_and_the_old_go_on(address: str) -> None:
    bench = Bench(address, fails=lambda name: name.slot.index == 3)
    await bench.pools.filled(bench.pools.set_size(Pool.DECODE, 2, 0.0).started)
    old = bench.pools.keepers()
    with pytest.raises(WorkerGivenUp, match="decode-3 cannot start: no such model"):
        await RollingRestart((Pool.DECODE,), 2, 0.0).run(bench.pools, bench.warm)
    keeper, error = await asyncio.wait_for(bench.pools.next_given_up(), 1)
    assert keeper.slot.worker_id == "decode-3" and isinstance(error, WorkerGivenUp)
    assert bench.pools.keepers() == old
    assert not {"draining decode-0", "draining decode-1"} & set(bench.told)
    await bench.pools.close(1.0)


class NotePad:
    """Notes as Ray keeps them; and its free places."""

    def __init__(self, places: int = 0) -> None:
        self.texts: dict[str, str] = {}
        self.places = places

    def remember(self, key: str, text: str) -> None:
        self.texts[key] = text

    def recall(self, key: str) -> str:
        return self.texts.get(key, "")

    def num_places(self, resources: object, pool: object) -> int:
        return self.places


def test_sizes_outlive_a_controller_but_not_a_changed_configuration() -> None:
    pad, config = NotePad(), ServeConfig(prefill_workers=1, decode_workers=2)
    assert SizeBook(pad, config).read() == {Pool.PREFILL: 1, Pool.DECODE: 2}
    SizeBook(pad, config).write({Pool.PREFILL: 1, Pool.DECODE: 4})
    assert SizeBook(pad, config).read() == {Pool.PREFILL: 1, Pool.DECODE: 4}
    changed = ServeConfig(prefill_workers=1, decode_workers=3)
    assert SizeBook(pad, changed).read() == {Pool.PREFILL: 1, Pool.DECODE: 3}
    SizeBook(pad, config).forget()
    assert SizeBook(pad, config).read() == {Pool.PREFILL: 1, Pool.DECODE: 2}
    pad.texts["pool-sizes"] = "[broken"
    assert SizeBook(pad, config).read() == {Pool.PREFILL: 1, Pool.DECODE: 2}


def test_sizes_that_cannot_be_are_refused_with_words() -> None:
    config = ServeConfig(metrics_port=65530)
    for size, words in ((0, "needs at least 1 worker"), (5000, "more than a pool may have"), (4, "no port for the metrics")):
        with pytest.raises(InvalidConfig, match=words):
            check_size(config, Pool.DECODE, size)
    scales = ServeConfig(autoscale_decode="1-2")
    check_size(scales, Pool.DECODE, 2)
    with pytest.raises(InvalidConfig, match="scales itself between 1-2 workers; 3 would not last"):
        check_size(scales, Pool.DECODE, 3)
    check_size(ServeConfig(autoscale_decode="1-2", autoscale_dry_run=True), Pool.DECODE, 3)


def test_room_is_memory_here_and_places_in_a_joined_ray() -> None:
    def room(config: ServeConfig, places: int, more: dict[Pool, int]) -> None:
        check_room(config, NotePad(places), more, 2)

    with pytest.raises(CapacityExceeded, match="lower --kv-memory or the number of workers"):
        room(ServeConfig(kv_memory=1 << 40), 99, {Pool.DECODE: 1})
    joined = ServeConfig(ray_address="127.0.0.1:6379", kv_memory=1 << 40, threads_per_worker=4)
    with pytest.raises(CapacityExceeded, match="2 more workers of 4 CPUs each do not fit: Ray has free places for 1"):
        room(joined, 1, {Pool.PREFILL: 1, Pool.DECODE: 1})
    room(joined, 2, {Pool.PREFILL: 1, Pool.DECODE: 1})
    room(joined, 0, {Pool.DECODE: 0})
