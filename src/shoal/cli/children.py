"""Child processes that cannot outlive their parent. Knows pipes, signals and Linux's parent-death signal; knows no Shoal part."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


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
            preexec_fn=_die_with_parent,
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


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that `end_descendants` finds them (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(wait_s: float = 5.0) -> list[str]:
    """Kill and reap every process below this one; return their names. Call when no child is needed any more."""
    import psutil  # here: part of the `serve` extra, as the processes to end are

    me, ended = psutil.Process(), dict[int, str]()
    while descendants := [p for p in me.children(recursive=True) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                ended[process.pid] = process.name()
                process.kill()
        psutil.wait_procs(descendants, timeout=wait_s)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return list(ended.values())


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


async def _read_lines(stream: asyncio.StreamReader, consume: Callable[[str], None]) -> None:
    while line := await stream.readline():
        consume(line.decode(errors="replace").rstrip())
