"""Has prefill workers connect to decode workers before the first request needs it. Knows endpoints; knows no pair's inside."""

import asyncio
import logging
from collections.abc import Callable

from shoal.controller.endpoints import EndpointBoard
from shoal.controller.ray_cluster import ActorHandle
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2

_log = logging.getLogger(__name__)
_Incarnation = tuple[str, int]  # id and epoch
_Pair = tuple[_Incarnation, _Incarnation]


class PairWarmer:
    """Makes each pair of ready workers once, as workers become ready; `handle_of` finds a prefill worker's actor.

    A pair that cannot be made now is only logged: it is made on its first use, which reports the error.
    """

    def __init__(self, board: EndpointBoard, handle_of: Callable[[str], ActorHandle | None]) -> None:
        self._board = board
        self._handle_of = handle_of
        self._warming: dict[_Pair, asyncio.Task[None]] = {}  # of every pair there is; done once it was tried

    async def run(self) -> None:
        """Until the board closes."""
        async for _ in self._board.watch():
            self._begin()

    async def settled(self, worker: _Incarnation) -> None:
        """Return once every pair of this ready worker with another ready one has been tried."""
        self._begin()
        own = [task for pair, task in self._warming.items() if worker in pair]
        if own:
            await asyncio.wait(own)

    def _begin(self) -> None:
        """Start what is new; forget what is no more."""
        ready = [(p, d) for p in self._board.ready("prefill") for d in self._board.ready("decode")]
        pairs = {((p.worker_id, p.epoch), (d.worker_id, d.epoch)): (p, d) for p, d in ready}
        for gone in self._warming.keys() - pairs.keys():
            self._warming.pop(gone)
        for pair, (prefill, decode) in pairs.items():
            if pair not in self._warming:
                task = asyncio.create_task(self._warm(self._handle_of(prefill.worker_id), decode))
                task.add_done_callback(_log_failure)  # nothing depends on it
                self._warming[pair] = task

    async def _warm(self, handle: ActorHandle | None, decode: worker_pb2.WorkerDescription) -> None:
        if handle is None:
            return
        try:
            await handle.prewarm(decode)
        except Unavailable as error:
            _log.info("%s and %s are not connected yet: %s", handle.name.slot.worker_id, decode.worker_id, error)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a pair could not be prewarmed", exc_info=error)
