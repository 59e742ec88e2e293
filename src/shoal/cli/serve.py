"""`shoal serve`: a whole cluster on this machine, until Ctrl-C. Checks first, then supervises; imports neither torch nor Ray."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from shoal.cli.failure import told_in_one_line
from shoal.cli.preflight import check, context_note
from shoal.cli.progress import StartProgress
from shoal.cli.serve_options import read_config, serve_options
from shoal.cli.supervisor import Listeners, Supervisor
from shoal.config.serve import ServeConfig


@click.command(short_help="Start a cluster: router, prefill and decode workers.")
@serve_options
def serve(config_file: Path | None, **flags: Any) -> None:
    """Start a router, prefill workers and decode workers, and serve until Ctrl-C.

    With --colocated there is no prefill pool: the same engine, router and doors, in one pool of workers.

    \b
    shoal serve --visibilities full,speed:22,pop:20
    shoal generate "Why do shoals of fish turn together?" --visibility speed:22
    """
    with told_in_one_line():
        config = read_config(config_file, flags)
        note = context_note(config, check(config))
        asyncio.run(_serve(config, Console(stderr=True), note))


async def _serve(config: ServeConfig, console: Console, note: str) -> None:
    progress = StartProgress(console, config.log_format)
    supervisor = Supervisor(config, Listeners(progress.on_event, progress.log))
    running = asyncio.create_task(_run(supervisor, progress, note))
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            progress.log("stopping: running requests may finish (once more to stop at once)")
            running.cancel()
        else:
            supervisor.kill()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        if not num_signals:
            raise
    finally:
        progress.close()
        leftover = await supervisor.stop()
        if leftover and num_signals < 2:
            progress.log(f"ended what was left: {', '.join(sorted(set(leftover)))}")
    progress.log("stopped")


def _pools(config: ServeConfig) -> str:
    if config.colocated:
        return f"{config.decode_workers} colocated"
    return f"{config.prefill_workers} prefill, {config.decode_workers} decode"


async def _run(supervisor: Supervisor, progress: StartProgress, note: str) -> None:
    await supervisor.start()
    if note:
        progress.log(note)
    progress.close()
    config = supervisor.config
    tls = " --tls-ca YOUR_CA.pem" if config.tls.is_on else ""
    where = ", ".join(place.listen for place in supervisor.routers)
    click.echo(
        f"ready: {config.model} on {where}  "
        f"({_pools(config)}; {', '.join(config.visibilities)})\n"
        f'try:   shoal generate --address {supervisor.address}{tls} "Why do fish swim in shoals?"'
    )
    if config.http_listen:
        urls = ", ".join(f"{'https' if tls else 'http'}://{place.http_listen}/v1" for place in supervisor.routers)
        click.echo(f"http:  OpenAI's API at {urls}")
    sys.stdout.flush()
    await supervisor.wait()
