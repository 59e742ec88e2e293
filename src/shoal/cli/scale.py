"""`shoal scale` and `shoal restart`: orders to a running controller, and what comes of them. Knows its calls; decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import click
import grpc

from shoal.cli.controller_options import ControllerAt, controller_options
from shoal.cli.failure import told_in_one_line
from shoal.errors import InvalidRequest
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc
from shoal.rpc import error_from_rpc

_DRAIN_HELP = "Seconds running requests may finish before they go on elsewhere.  [default: the cluster's --grace-s]"


@click.command(short_help="Change how many workers a running cluster has.")
@controller_options
@click.option("--prefill", type=click.IntRange(0), metavar="N", help="Workers that prefill is to have.")
@click.option("--decode", type=click.IntRange(0), metavar="N", help="Workers that decode is to have.")
@click.option("--drain-s", type=click.FloatRange(0), help=_DRAIN_HELP)
@click.option("--allow-pending", is_flag=True, help="Accept workers that Ray cannot place yet: nodes will come.")
@click.option("--dry-run", is_flag=True, help="Check, say what would be done, and change nothing.")
def scale(
    at: ControllerAt, prefill: int | None, decode: int | None, drain_s: float | None, allow_pending: bool, dry_run: bool
) -> None:
    """Bring the pools to these sizes, while requests run.

    New workers take requests as soon as they are ready. Those that go take no new ones, finish or hand over what runs, and end:
    nothing is lost. Ctrl-C ends the watching, not the change.

    \b
    shoal scale --decode 3
    shoal scale --prefill 1 --decode 2 --dry-run
    """
    with told_in_one_line():
        if prefill is None and decode is None:
            raise InvalidRequest("name what to change: --prefill N, --decode N, or both")
        request = controller_pb2.ScaleRequest(
            prefill_workers=prefill, decode_workers=decode, drain_s=drain_s, allow_pending=allow_pending, dry_run=dry_run
        )
        asyncio.run(_show(at, "Scale", request))


@click.command(short_help="Replace every worker of a running cluster, a few at a time.")
@controller_options
@click.option("--rolling", is_flag=True, required=True, help="One after the other, while requests run.")
@click.option("--pool", "pools", type=click.Choice(["prefill", "decode"]), multiple=True, help="Only this pool.")
@click.option(
    "--surge", type=click.IntRange(0), default=1, show_default=True,
    help="How many at a time, and how many workers more than usual meanwhile; 0: drain each before its successor starts.",
)  # fmt: skip
@click.option("--drain-s", type=click.FloatRange(0), help=_DRAIN_HELP)
@click.option("--dry-run", is_flag=True, help="Check, say what would be done, and change nothing.")
def restart(at: ControllerAt, rolling: bool, pools: tuple[str, ...], surge: int, drain_s: float | None, dry_run: bool) -> None:
    """Replace workers by new ones of the same configuration, as after an upgrade or for new certificates.

    Each successor is ready, and connected to its peers, before its predecessor drains. If one cannot start, the restart stops
    there and the old workers go on. Ctrl-C ends the watching, not the restart.
    """
    with told_in_one_line():
        request = controller_pb2.RollingRestartRequest(pools=pools, surge=surge, drain_s=drain_s, dry_run=dry_run)
        asyncio.run(_show(at, "RollingRestart", request))


async def _show(at: ControllerAt, method: str, request: Any) -> None:
    async for event in _events(at, method, request):
        if line := _line(event):
            click.echo(line)


async def _events(at: ControllerAt, method: str, request: Any) -> AsyncIterator[controller_pb2.PoolEvent]:
    address, link = at.find()
    async with link.open_channel(address) as channel:
        call = getattr(controller_pb2_grpc.ControllerStub(channel), method)(request)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


def _line(event: controller_pb2.PoolEvent) -> str:
    """One event in words; "" for steps too small to tell."""
    match event.kind:
        case "plan" | "failed" | "dead":
            words = event.message
        case "starting":
            words = f"starting: {event.message}" if event.message else "starting"
        case "loading":
            words = "" if event.loaded_bytes < event.total_bytes else "weights loaded"
        case "ready":
            words = "ready, takes requests"
        case "warm":
            words = f"connected to its peers, {event.seconds:.1f} s after it was ready"
        case "draining":
            words = "draining: no new requests"
        case "gone":
            words = f"gone, {event.seconds:.1f} s after it began to drain"
        case "done":
            return f"done: {event.message}" if event.message else f"done in {event.seconds:.1f} s"
        case _:
            words = ""
    return f"{event.worker_id}: {words}" if words else ""
