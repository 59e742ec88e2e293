"""A cluster of a command's own, for as long as the command needs it. Knows the supervisor; knows no request."""

import contextlib
from collections import deque
from collections.abc import AsyncIterator

from rich.console import Console

from shoal.cli.progress import StartProgress
from shoal.cli.supervisor import ClusterFailed, Listeners, Supervisor
from shoal.config.serve import ServeConfig


@contextlib.asynccontextmanager
async def own_cluster(config: ServeConfig, console: Console) -> AsyncIterator[str]:
    """A running cluster's address. Its logs are shown only when it fails."""
    log: deque[str] = deque(maxlen=30)
    progress = StartProgress(console)
    supervisor = Supervisor(config, Listeners(progress.on_event, log.append))
    try:
        console.print(f"Starting a cluster for [bold]{config.model}[/bold]: Ray, a prefill worker, a decode worker, a router.")
        await supervisor.start()
        progress.close()
        yield supervisor.address
    except ClusterFailed:
        for line in log:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")
        raise
    finally:
        progress.close()
        await supervisor.stop()
