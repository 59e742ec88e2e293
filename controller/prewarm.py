"""Has prefill workers connect to decode workers before the first request needs it. Knows endpoints; knows no pair's inside."""

import asyncio
import logging
from collections.abc import Callable

from shoal.controller.endpoints import EndpointBoard
from shoal.controller.ray_cluster import ActorHandle
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2

_log = logging.getLogger(__name__)


async def keep_pairs_warm(board: EndpointBoard, handle_of: Callable[[str], ActorHandle | None]) -> None:
    """Make each pair of ready workers once, as workers become ready; `handle_of` finds a prefill worker's actor.

    A pair that cannot be made now is only logged: it is made on its first use, which reports the error.
    """
    warmed: set[tuple[str, int, str, int]] = set()
    async for _ in board.watch():
        pairs = [(p, d) for p in board.ready("prefill") for d in board.ready("decode")]
        due = {(p.worker_id, p.epoch, d.worker_id, d.epoch): (p, d) for p, d in pairs}
        warmed &= due.keys()
        new = [due[key] for key in due.keys() - warmed]
        warmed |= due.keys()
        await asyncio.gather(*(_warm(handle_of(prefill.worker_id), decode) for prefill, decode in new))


async def _warm(handle: ActorHandle | None, decode: worker_pb2.WorkerDescription) -> None:
    if handle is None:
        return
    try:
        await handle.prewarm(decode)
    except Unavailable as error:
        _log.info("%s and %s are not connected yet: %s", handle.name.slot.worker_id, decode.worker_id, error)
