"""What the controller tells whoever started it: one JSON object a line. Knows no worker and no terminal."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is one of ray, listening, starting, loading, ready, warm, draining, gone, dead, all-ready, failed, stopping,
    stopped; to those who ordered a change also plan and done. `failed` with `fatal` false: one worker is given up, the
    others go on."""

    kind: str
    worker: str = ""
    message: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, line: str) -> "Event":
        """Raises ValueError when the line is not an event."""
        values = json.loads(line)
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise ValueError("not an event")
        return cls(values["kind"], values.get("worker", ""), values.get("message", ""), values.get("data", {}))


BEAT: Final = Event("beat").encode()  # the controller moves; written again and again, for whoever started it


class EventWriter:
    """Writes events to a stream, and to whoever listens; a reader that went away is no reason to fail."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self._listeners: set[asyncio.Queue[Event]] = set()

    @contextmanager
    def listening(self) -> "Iterator[asyncio.Queue[Event]]":
        """Events from now on, until the end of the block."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def emit(self, kind: str, worker: str = "", message: str = "", **data: Any) -> None:
        event = Event(kind, worker, message, data)
        for queue in self._listeners:
            queue.put_nowait(event)
        self._write(event.encode())

    async def beat(self, interval_s: float) -> None:
        """Show, forever, that the event loop runs. Listeners are not told."""
        while True:
            self._write(BEAT)
            await asyncio.sleep(interval_s)

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._stream = None
