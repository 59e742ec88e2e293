"""Shows a cluster's start: bars on a terminal, one line a step elsewhere. Knows events; decides nothing."""

import json
import logging
import re
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from shoal.config.logs import JsonLines
from shoal.controller.events import Event

_RAY_PREFIX: Final = re.compile(r"\([^()]*pid=\d+[^()]*\) (?=\{)")  # what Ray puts before a worker's line


class StartProgress:
    """Feed it events; `close` it when the start is over. News after that (a death, a restart) are printed as lines."""

    def __init__(self, console: Console, log_format: str = "text") -> None:
        """With `json` there are no bars, and every line is a JSON object: what is none already is put into one."""
        self._console = console
        self._json = JsonLines("serve") if log_format == "json" else None
        self._began_at = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if console.is_terminal and self._json is None:
            self._bars = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[who]:<11}"),
                TextColumn("{task.description:<22}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._bars.start()

    def on_event(self, event: Event) -> None:
        """Show one event."""
        who = event.worker or "Ray"
        if event.kind == "ray":
            self._step(who, event.message, None)
        elif event.kind == "listening":
            transfer = event.data.get("transfer")
            self._step("Ray", "running" + (f"; KV crosses by {transfer}" if transfer else ""), 1.0)
        elif event.kind == "starting":
            self._step(who, "starting" + (f": {event.message}" if event.message else ""), None)
        elif event.kind == "loading":
            done, total = int(event.data["done"]), max(1, int(event.data["total"]))
            self._step(who, f"loading weights {done / total:4.0%}", done / total, quiet=done < total)
        elif event.kind == "ready":
            self._step(who, "ready", 1.0)
        elif event.kind in ("dead", "failed", "restarting", "hung", "moving") and event.message:
            self.log(f"{who}: {event.message}" if event.worker else event.message)

    def log(self, line: str) -> None:
        """One line of a child's log, above the bars."""
        if self._json is not None:
            line = _json_line(line, self._json)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bars away. Harmless when repeated."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._tasks.clear()

    def _step(self, who: str, what: str, share: float | None, *, quiet: bool = False) -> None:
        if self._bars is None:
            if not quiet:
                self.log(f"[{time.monotonic() - self._began_at:5.1f} s] {who}: {what}")
            return
        if who not in self._tasks:
            self._tasks[who] = self._bars.add_task(what, total=None, who=who)
        self._bars.update(self._tasks[who], description=what, total=None if share is None else 1.0, completed=share or 0.0)


def _json_line(line: str, form: JsonLines) -> str:
    bare = _RAY_PREFIX.sub("", line, count=1)
    try:
        if isinstance(json.loads(bare), dict):
            return bare
    except ValueError:
        pass  # not ours: Ray's, or a traceback's
    return form.format(logging.LogRecord("shoal.cli.serve", logging.INFO, "", 0, "%s", (line,), None))
