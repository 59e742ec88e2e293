"""`shoal autoscale`: what autoscaling decided for each pool, and why, in one line or as JSON. Knows the controller's call."""

import asyncio
import json
import time
from typing import Any

import click
import grpc

from shoal.cli.controller_options import ControllerAt, controller_options
from shoal.cli.failure import told_in_one_line
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc
from shoal.rpc import error_from_rpc


@click.command(short_help="Show what autoscaling decided for each pool, and why.")
@controller_options
@click.option("--follow", is_flag=True, help="Also each decision from now on, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with all that was seen.")
def autoscale(at: ControllerAt, follow: bool, as_json: bool) -> None:
    """Show the last decision for each pool that scales: what was seen, what it needs, what kept it from that, what was done.

    Scaling is turned on by `shoal serve --autoscale-prefill MIN-MAX --autoscale-decode MIN-MAX`; with --autoscale-dry-run it
    decides and changes nothing.
    """
    with told_in_one_line():
        asyncio.run(_show(at, follow=follow, as_json=as_json))


async def _show(at: ControllerAt, *, follow: bool, as_json: bool) -> None:
    address, link = at.find()
    async with link.open_channel(address) as channel:
        stub: Any = controller_pb2_grpc.ControllerStub(channel)
        try:
            async for decision in stub.WatchScaling(controller_pb2.WatchScalingRequest(follow=follow)):
                click.echo(json.dumps(to_json(decision)) if as_json else to_line(decision))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


def to_json(decision: controller_pb2.ScalingDecision) -> dict[str, Any]:
    """Every field, by its name."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(decision.unix_s)),
        "pool": decision.pool,
        "decision": decision.decision,
        "because": list(decision.because),
        "dry_run": decision.dry_run,
        "workers": decision.num_workers,
        "wanted": decision.num_wanted,
        "needed": decision.num_needed,
        "needed_for": {
            "work": decision.needed_for_work,
            "wait": decision.needed_for_wait,
            "room": decision.needed_for_room,
        },
        "bounds": [decision.min_workers, decision.max_workers],
        "seen": {name: float(f"{value:.4g}") for name, value in sorted(decision.seen.items())},
        "message": decision.message,
    }


def to_line(decision: controller_pb2.ScalingDecision) -> str:
    """`12:00:05 decode: grow 1 → 2 (work) · needs 2: work 2, wait 1, room 1 · bounds 1-4 · rows=12 …`"""
    clock = time.strftime("%H:%M:%S", time.localtime(decision.unix_s))
    sizes = f"{decision.num_workers} → {decision.num_wanted}" if decision.decision != "hold" else str(decision.num_workers)
    why = f" ({', '.join(decision.because)})" if decision.because else ""
    need = (
        f"needs {decision.num_needed}: work {decision.needed_for_work}, wait {decision.needed_for_wait}, "
        f"room {decision.needed_for_room}"
    )
    parts = [
        f"{clock} {decision.pool}: {decision.decision} {sizes}{why}" + (", dry run" if decision.dry_run else ""),
        need,
        f"bounds {decision.min_workers}-{decision.max_workers}",
        " ".join(f"{name}={value:.4g}" for name, value in sorted(decision.seen.items())),
        decision.message,
    ]
    return " · ".join(filter(None, parts))
