"""The heartbeat of a worker: decide → execute → account, again and again. Knows one thread and one loop; not what a step does.

Decisions and accounts belong to the event loop. Only `execute` runs in the step thread, alone, so everything that writes slots
being computed has one writer.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from shoal.placement.rates import WorkRate
from shoal.placement.tally import Tally

Step = TypeVar("Step")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class StepLoop(ABC, Generic[Step, Result]):
    """Runs steps while there are any and sleeps otherwise. `run` is one asyncio task for the life of the worker."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(num_threads,))
        self._wake = asyncio.Event()
        self._in_step: Collection[str] = ()
        self._step_over: asyncio.Future[None] | None = None
        self.num_steps = 0
        self.rate = WorkRate()  # of token-layers; `account` tells it
        self.tally = Tally()

    @abstractmethod
    def decide(self) -> Step | None:
        """The next step, or None when there is nothing to run."""

    @abstractmethod
    def keys(self, step: Step) -> Collection[str]:
        """The requests whose blocks the step reads or writes."""

    @abstractmethod
    def execute(self, step: Step) -> Result:
        """Run the step. In the step thread."""

    @abstractmethod
    def account(self, step: Step, result: Result, seconds: float) -> None:
        """Note what the step has done."""

    @abstractmethod
    def failed(self, step: Step) -> None:
        """The step raised: end every request in it. The error has been logged; its text is not for callers."""

    def wake(self) -> None:
        """There may be something to run."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            step = self.decide()
            if step is None:
                await self._wake.wait()
                continue
            self._in_step = self.keys(step)
            self._step_over = loop.create_future()
            started = loop.time()
            try:
                result = await loop.run_in_executor(self._thread, self.execute, step)
            except Exception:  # noqa: BLE001  # not swallowed: logged, and every request of the step ends with an error
                _log.exception("a step failed")
                self.failed(step)
            else:
                self.num_steps += 1
                self.account(step, result, loop.time() - started)
            finally:
                self._in_step = ()
                self._step_over.set_result(None)

    async def outside_step(self, key: str) -> None:
        """Return once no running step touches the request's blocks."""
        while key in self._in_step and self._step_over is not None:
            await asyncio.shield(self._step_over)

    def close(self) -> None:
        """End the step thread, after the step it is running."""
        self._thread.shutdown(wait=True)
