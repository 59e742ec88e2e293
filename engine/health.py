"""Keeps a worker's health true to whether it moves: NOT_SERVING while it is stalled, then SERVING again. Decides nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shoal.metrics import gauge
from shoal.placement.stall import StallWatch, Standing

_log = logging.getLogger(__name__)
STALLED = gauge("shoal_engine_stalled_state", "1 while requests should move and none does: no step, no block freed")


async def keep_health(look: Callable[[], Standing], set_serving: Callable[[bool], Awaitable[None]], patience_s: float) -> None:
    """Look for ever. Call while health is SERVING."""
    watch, ill, loop = StallWatch(patience_s), False, asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(1.0, patience_s / 4))
        standing = look()
        if (now_ill := watch.is_ill(standing, loop.time())) is ill:
            continue
        ill = now_ill
        STALLED.set(ill)
        if ill:
            _log.critical("stalled: nothing has moved for %g s; NOT_SERVING until something does (%s)", patience_s, standing)
        else:
            _log.warning("moving again: SERVING")
        await set_serving(not ill)
