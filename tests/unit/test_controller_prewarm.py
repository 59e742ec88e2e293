import asyncio
from typing import cast

from shoal.config.worker import Pool
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.names import ActorName, Slot
from shoal.controller.prewarm import PairWarmer
from shoal.controller.ray_cluster import ActorHandle
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2


class PrefillSide:
    """Notes what it is asked to connect to; refuses decode-1."""

    def __init__(self, name: ActorName) -> None:
        self.name = name
        self.asked: list[tuple[str, int]] = []

    async def prewarm(self, decode: worker_pb2.WorkerDescription) -> None:
        self.asked.append((decode.worker_id, decode.epoch))
        if decode.worker_id == "decode-1":
            raise Unavailable("it died")


async def test_each_pair_is_made_once_per_epoch_and_a_refusal_harms_nobody() -> None:
    board = EndpointBoard()
    prefill = PrefillSide(ActorName(Slot(Pool.PREFILL, 0), 1))

    def ready(pool: Pool, index: int, epoch: int) -> None:
        name = ActorName(Slot(pool, index), epoch)
        board.set(name, EndpointState.READY, worker_pb2.WorkerDescription(worker_id=name.slot.worker_id, pool=pool, epoch=epoch))

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    warmer = PairWarmer(board, lambda _: cast(ActorHandle, prefill))
    warming = asyncio.create_task(warmer.run())
    ready(Pool.PREFILL, 0, 1)
    ready(Pool.DECODE, 1, 1)
    await settle()
    ready(Pool.DECODE, 0, 1)
    await settle()
    board.set(ActorName(Slot(Pool.DECODE, 0), 1), EndpointState.DEAD)
    await settle()
    ready(Pool.DECODE, 0, 2)
    await asyncio.wait_for(warmer.settled(("decode-0", 2)), 1)
    assert prefill.asked[-1] == ("decode-0", 2)
    board.close()
    await asyncio.wait_for(warming, 1)
    assert prefill.asked == [("decode-1", 1), ("decode-0", 1), ("decode-0", 2)]
