"""`shoal info` and `shoal loads`: what a server says of itself."""

from typing import Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.failure import told_in_one_line
from shoal.cli.pools_frame import QualityRow
from shoal.cli.pools_table import quality_line
from shoal.cli.server_options import Server, server_options

_WIDTH_WHEN_PIPED: Final = 120


@click.command()
@server_options
def info(server: Server) -> None:
    """Show the served model, what requests may ask for, and the workers behind the router."""
    with told_in_one_line(), server.connect() as client:
        model, told = client.model_info(), client.server_info()
        facts = Table(show_header=False, box=None)
        facts.add_column(style="bold")
        facts.add_row("model", f"{model.served_model_name} ({model.model_type}, {model.num_layers} layers, {model.dtype})")
        facts.add_row("revision", model.revision)
        if model.adapter:
            facts.add_row("adapter", model.adapter)
        facts.add_row("licence", model.license or "not stated")
        facts.add_row("context", f"{model.max_context_length} tokens, prompt and answer together")
        facts.add_row("visibilities", ", ".join(model.allowed_visibilities) + "  (the first is the default)")
        facts.add_row("boundary", f"at most {model.max_boundary_tokens} tokens")
        if model.supports_vision:
            facts.add_row("images", escape(f"taken; in a text prompt {model.image_placeholder} stands for one"))
        facts.add_row("server", f"shoal {told.version}, up {told.uptime_seconds:.0f} s, {told.active_requests} requests running")
        qualities = [quality_line(QualityRow.read(quality)) for quality in told.quality]
        workers = Table("worker", "pool", "state", "address", "epoch", box=None)
        for worker in told.workers:
            pool = f"{worker.pool}, colocated" if worker.colocated else worker.pool
            workers.add_row(worker.worker_id, pool, worker.state, worker.address, str(worker.epoch))
        console = Console()
        console.print(facts)
        for line in qualities:
            console.print(line, soft_wrap=True)
        console.print(workers if told.workers else "no workers are known yet")


@click.command()
@server_options
def loads(server: Server) -> None:
    """Show what every worker that answers holds now.

    runs, waits: requests. blocks: KV blocks used of all. reserved: requests that hold blocks and wait for KV. moves:
    transfers in flight. work: accepted and not yet done, in tokens × layers. staging: buffers in use. layers: held in memory.
    """
    with told_in_one_line(), server.connect() as client:
        table = Table(box=None)
        table.add_column("worker", no_wrap=True)
        for name in ("runs", "waits", "blocks", "reserved", "moves", "work", "staging", "layers", "memory"):
            table.add_column(name, justify="right")
        found = client.loads()
        for load in found:
            staging = str(load.num_staging_in_use)
            if load.num_staging_quarantined:
                staging += f" ({load.num_staging_quarantined} in quarantine)"
            table.add_row(
                load.worker_id, str(load.num_running_reqs), str(load.num_waiting_reqs),
                f"{load.num_used_blocks}/{load.num_total_blocks}", str(load.num_reservations),
                str(load.num_transfers_in_flight), str(load.outstanding_token_layers), staging,
                str(load.num_layers_held), f"{load.resident_bytes / 2**20:.0f} MiB",
            )  # fmt: skip
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH_WHEN_PIPED)
        console.print(table if found else "no worker answers")
