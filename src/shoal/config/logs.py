"""How every Shoal process logs: one line an event on stderr, text or JSON, with whose request it is. Never prompts or token ids.

A process that takes a request in binds its ids (`log_ids`); every line that is written on its behalf then carries them.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from shoal.errors import (
    AlreadyExists,
    Cancelled,
    CapacityExceeded,
    DeadlineExceeded,
    InternalError,
    Mismatch,
    ShoalError,
    Unavailable,
)

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
LEVEL_VARIABLE: Final = "SHOAL_LOG_LEVEL"  # how a controller tells its workers
FORMAT_VARIABLE: Final = "SHOAL_LOG_FORMAT"

_IDS: ContextVar[Mapping[str, str]] = ContextVar("shoal_log_ids", default=MappingProxyType({}))
_FIELDS: Final = "shoal_fields"  # the attribute of a record that holds an event's fields
_PLAIN_VALUE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_OF_OUR_OWN: Final = (AlreadyExists, Cancelled, CapacityExceeded, DeadlineExceeded, InternalError, Mismatch, Unavailable)
_FOREIGN: Final = ("asyncio", "grpc", "ray", "PIL")  # log only what is worth a warning; Pillow tells what files hold


def configure_logging(level: str, process: str, log_format: str = "text") -> None:
    """Set up the root logger of this process; `process` is its name in each line (`router`, `prefill-0`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in _FOREIGN:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def configure_worker_logging(process: str) -> None:
    """The same as a controller's environment wants it; info and text without one."""
    configure_logging(os.environ.get(LEVEL_VARIABLE, "info"), process, os.environ.get(FORMAT_VARIABLE, "text"))


@contextmanager
def log_ids(**ids: str) -> Iterator[None]:
    """Lines written inside, and by tasks that are started inside, carry these ids. Empty ones are left out."""
    before = _IDS.get()
    bind_log_ids(**ids)
    try:
        yield
    finally:
        _IDS.set(before)  # not by token: a generator may be closed from another context


def bind_log_ids(**ids: str) -> None:
    """Add ids for the rest of this context."""
    _IDS.set({**_IDS.get(), **{name: value for name, value in ids.items() if value}})


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """One event with its fields: ids, names, counts, seconds, bytes. None and "" are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={_FIELDS: fields})


def loggable(error: ShoalError) -> str:
    """An error's class and, when it is no answer to what a client wrote, its words: a refusal may quote the request."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, _OF_OUR_OWN) else name


class TextLines(logging.Formatter):
    """`time LEVEL process logger: message key=value …`; a traceback follows on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record), record.levelname, self._process, f"{record.name}:", _one_line(record.getMessage())]
        words += [f"{name}={_text_value(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, then ids and fields, and `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        exception = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**own, **_fields(record), **own, **exception}, default=str)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    known = {name: value for name, value in fields.items() if value is not None and value != ""}
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in {**_IDS.get(), **known}.items()}


def _text_value(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)  # what a client named must not make a line of its own


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
