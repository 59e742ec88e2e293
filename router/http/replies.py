"""Runs the requests that one HTTP request asks for, side by side. Knows the service; knows no JSON."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from shoal.pb.v1 import shoal_pb2
from shoal.router.service import RouterService

_SIDE_BY_SIDE: Final = 16  # prompts of one HTTP request that run at once
Reply = tuple[int, shoal_pb2.GenerateResponse]


async def all_replies(
    service: RouterService, requests: Sequence[shoal_pb2.GenerateRequest], time_left_s: float
) -> AsyncGenerator[Reply, None]:
    """(index of the request, reply) as they come. The first error ends all; closing the generator too."""
    if len(requests) == 1:
        async with aclosing(service.generate(requests[0], time_left_s)) as replies:
            async for reply in replies:
                yield 0, reply
        return
    slots = asyncio.Semaphore(_SIDE_BY_SIDE)
    queue: asyncio.Queue[Reply | Exception | None] = asyncio.Queue(maxsize=len(requests))
    deadline = asyncio.get_running_loop().time() + time_left_s

    async def pump(index: int, request: shoal_pb2.GenerateRequest) -> None:
        try:
            async with slots:
                left_s = deadline - asyncio.get_running_loop().time()
                async with aclosing(service.generate(request, left_s)) as replies:
                    async for reply in replies:
                        await queue.put((index, reply))
        except Exception as error:  # noqa: BLE001  # the consumer raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = {asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)}
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
