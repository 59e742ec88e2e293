"""`shoal top`: the pools of a running server, again and again. Knows when to look and what to do when nobody answers."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shoal.cli.failure import told_in_one_line
from shoal.cli.pools_frame import PoolsFrame
from shoal.cli.pools_table import draw
from shoal.cli.server_options import Server, server_options
from shoal.client import Client
from shoal.client.connection import Retry
from shoal.errors import DeadlineExceeded, Unavailable

_WIDTH_WHEN_PIPED: Final = 140
_SHORTEST_INTERVAL_S: Final = 0.1


@click.command(short_help="Show the pools live.")
@server_options
@click.option(
    "--interval-s", "-i", type=click.FloatRange(_SHORTEST_INTERVAL_S), default=1.0, show_default=True, help="Between two looks."
)
@click.option("--once", is_flag=True, help="One look, then end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look, on one line.")
def top(server: Server, interval_s: float, once: bool, as_json: bool) -> None:
    """Show what every worker holds, live, until Ctrl-C.

    runs, waits: requests. blocks: KV blocks used of all. reserved: requests that hold blocks. moves: transfers in flight.
    staging: buffers in use. work: accepted and not yet done, in tokens × layers. A worker that should report and does not is
    `silent`. Below: what replays at full depth say of shallow visibilities, on the router that is asked. When the server stops
    answering, a terminal says so and goes on trying; piped, or with --once, the command ends.
    """
    with told_in_one_line(), suppress(KeyboardInterrupt):  # the ordinary end of a live view
        _run(server, interval_s, once=once, as_json=as_json)


def _run(server: Server, interval_s: float, *, once: bool, as_json: bool) -> None:
    console = Console()
    with server.connect(Retry(attempts=1)) as client:
        if console.is_terminal and not once and not as_json:
            looks = look_again(lambda: look(client), interval_s)
            with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                for shown, trouble in looks:
                    parts = [Text(trouble, style="bold red")] if trouble else []
                    live.update(Group(*parts, *([draw(shown)] if shown else [])), refresh=True)
            return
        plain = console if console.is_terminal else Console(width=_WIDTH_WHEN_PIPED)
        while True:
            frame = look(client)
            if as_json:
                click.echo(json.dumps(frame.to_mapping()))
            else:
                plain.print(draw(frame))
            if once:
                return
            time.sleep(interval_s)


def look(client: Client) -> PoolsFrame:
    """Both answers of a server, joined. Raises shoal.errors."""
    return PoolsFrame.read(client.address, client.server_info(), client.loads())


def look_again(
    see: Callable[[], PoolsFrame], interval_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[PoolsFrame | None, str]]:
    """For ever: the latest look that there is, and "" or, when nobody answers now, words about it."""
    latest: PoolsFrame | None = None
    gone_at: float | None = None
    while True:
        trouble = ""
        try:
            latest, gone_at = see(), None
        except (Unavailable, DeadlineExceeded) as error:
            now = time.monotonic()
            gone_at = now if gone_at is None else gone_at
            what = "below: the last look; " if latest else ""
            trouble = f"no answer for {now - gone_at:.0f} s ({' '.join(str(error).split())}); {what}trying again, Ctrl-C ends"
        yield latest, trouble
        sleep(interval_s)
