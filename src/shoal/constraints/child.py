"""A child process whose lines are written and read on the event loop. Knows pipes; knows nothing of constraints.

Python's own subprocess starts it, whatever the loop: uvloop forks, and a fork of a process in which gRPC's threads run can die
before it becomes the child (4 of 24 starts did). Python's uses vfork, which runs nothing of the parent's.
"""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

_MAX_LINE_BYTES = 1 << 20


class Child:
    """Its standard error is dropped. Belongs to one event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start it in a session of its own."""
        process = await asyncio.to_thread(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, process.stdin)
        return cls(process, reader, asyncio.StreamWriter(transport, protocol, None, loop))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status once it has ended; the negative signal when one ended it."""
        return self._process.poll()

    async def write_line(self, line: bytes) -> None:
        """Raises ConnectionError when it is gone."""
        self._writer.write(line + b"\n")
        await self._writer.drain()

    async def read_line(self) -> bytes:
        """The next line. Raises EOFError when it has ended."""
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Its exit status."""
        status = await asyncio.to_thread(self._process.wait)
        self._writer.close()
        return status
