"""Checks constraints in a process of their own, before anything else is done for them. Knows processes; compiles nothing itself.

What clients send is compiled by native code whose cost no limit of its own bounds: some intersections of regular expressions
never end. The process ends itself when one takes too long, or dies of it; the constraint is refused, and a new process starts
when the next one comes. One death proves nothing, others may have killed it: the constraint is tried once more in a new one. What
passed here may be compiled elsewhere.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Final

import shoal
from shoal.constraints.child import Child
from shoal.constraints.grammar import field_name, grammar_of
from shoal.errors import InternalError, InvalidRequest, Unavailable
from shoal.types import Constraint

_log = logging.getLogger(__name__)
_START_S: Final = 60.0
_MARGIN_S: Final = 10.0  # the process keeps the limit itself
_MAX_REMEMBERED: Final = 256


class ConstraintVetter:
    """Belongs to one event loop. The process starts with the first constraint; `close` ends it."""

    def __init__(self, model: str, *, limit_s: float = 10.0) -> None:
        """`model` is a name or path, as open_model takes it. `limit_s` is what one constraint may take."""
        self._model = model
        self._limit_s = limit_s
        self._passed: OrderedDict[Constraint, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self._process: Child | None = None
        self.num_checked = 0  # by the process; those remembered are not

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest with the field and the grammar's own message when no answer can be held to it.

        Raises Unavailable when the process is there and does not answer.
        """
        if not self._passes(constraint):
            grammar_of(constraint)  # what can be seen without a vocabulary
            await asyncio.shield(asyncio.ensure_future(self._vet(constraint)))  # an answer must be read, whoever waits for it

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _passes(self, constraint: Constraint) -> bool:
        if constraint not in self._passed:
            return False
        self._passed.move_to_end(constraint)
        return True

    async def _vet(self, constraint: Constraint) -> None:
        async with self._turn:
            if self._passes(constraint):  # an equal one was before us
                return
            try:
                error = await self._ask(constraint)
            except EOFError:
                _log.warning("the process that checks constraints died; it is started again, and asked once more")
                try:
                    error = await self._ask(constraint)
                except EOFError:
                    error = f"{field_name(constraint)} asks too much of its compiler; simplify it"
            if error is not None:
                raise InvalidRequest(error)
            self._passed[constraint] = None
            while len(self._passed) > _MAX_REMEMBERED:
                self._passed.popitem(last=False)

    async def _ask(self, constraint: Constraint) -> str | None:
        """What is wrong with it, in words. Raises EOFError when the process died, and not at its own limit."""
        process = await self._started()
        self.num_checked += 1
        try:
            async with asyncio.timeout(self._limit_s + _MARGIN_S):
                await process.write_line(json.dumps({"kind": str(constraint.kind), "text": constraint.text}).encode())
                answer = json.loads(await process.read_line())
        except (TimeoutError, EOFError, ConnectionError) as failure:
            status = None if isinstance(failure, TimeoutError) else await process.wait()
            await self.close()
            if status is None:  # suspended, or starved: else its own limit would have ended it
                raise Unavailable("the process that checks constraints does not answer and is started again; try again") from None
            if status == -signal.SIGALRM:
                return f"{field_name(constraint)} takes more than {self._limit_s:g} s to compile; simplify it"
            raise EOFError from None
        error: str | None = answer["error"]
        return error

    async def _started(self) -> Child:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()
        root = str(Path(shoal.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        command = (sys.executable, "-m", "shoal.constraints", self._model, str(self._limit_s))
        environment = os.environ | {"PYTHONPATH": path}
        self._process = process = await Child.start(command, environment)
        try:
            async with asyncio.timeout(_START_S):
                await process.read_line()
        except (TimeoutError, EOFError) as error:
            await self.close()
            words = f"the process that checks constraints did not start (exit status {process.returncode})"
            raise InternalError(words) from error
        return process
