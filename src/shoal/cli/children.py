"""Child processes that cannot outlive their parent. Knows pipes and signals; knows no part of Shoal."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from shoal.controller.descendants import die_with_parent


class Child:
    """A process in a session of its own (a terminal's Ctrl-C reaches only us). It gets SIGTERM when our main thread dies."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    async def spawn(
        cls, name: str, arguments: Sequence[str], *, on_output: Callable[[str], None], on_log: Callable[[str], None]
    ) -> "Child":
        """Start `python <arguments>`; its standard input stays open until this process ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
            limit=1 << 20,
        )
        child = cls(name, process)
        assert process.stdout is not None and process.stderr is not None
        for stream, consume in ((process.stdout, on_output), (process.stderr, on_log)):
            child._readers.append(asyncio.create_task(_read_lines(stream, consume)))
        return child

    async def wait(self) -> int:
        """The exit status, once what the process wrote has been consumed (its descendants may hold the pipes a moment longer)."""
        status = await self.process.wait()
        await asyncio.wait(self._readers, timeout=0.5)
        return status

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL to its session when it takes longer than `timeout_s`."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), timeout_s)
            except TimeoutError:
                self.kill()
                await self.process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to the process and its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def _read_lines(stream: asyncio.StreamReader, consume: Callable[[str], None]) -> None:
    while True:  # to the end, whatever comes: a child whose pipe is full stands still
        try:
            line = await stream.readline()
        except ValueError:  # the part of a line that exceeds the limit has been dropped
            continue
        if not line:
            return
        consume(line.decode(errors="replace").rstrip())
