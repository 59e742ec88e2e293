"""Options of a simulated cluster that changes: workers that die, pools that scale. Knows flags; simulates nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shoal.errors import InvalidConfig
from shoal.placement.autoscale import AutoscalePolicy
from shoal.simulator.cluster.spec import AutoscaleSpec, Failure, FailureSpec
from shoal.simulator.units import parse_seconds

Command = TypeVar("Command", bound=Callable[..., Any])


def dynamics_options(command: Command) -> Command:
    """--mtbf, --fail, --restart, and --scale-prefill, -decode, -every, -start, -down-after, -by-utilisation."""
    for option in reversed(
        (
            click.option("--mtbf", help="Workers die by chance: mean uptime of each, such as 6h."),
            click.option("--fail", "fails", multiple=True, metavar="TIME:WORKER", help="One dies, as in 90s:decode-0-0; repeat."),
            click.option("--restart", default="30s", show_default=True, help="Until a worker that died serves again."),
            click.option("--scale-prefill", metavar="MIN-MAX", help="Autoscale this pool between these sizes, as in 1-4."),
            click.option("--scale-decode", metavar="MIN-MAX", help="The same of decode (or colocated) workers."),
            click.option("--scale-every", default="5s", show_default=True, help="How often pools are looked at."),
            click.option("--scale-start", default="30s", show_default=True, help="Until a new worker serves."),
            click.option("--scale-down-after", default="60s", show_default=True, help="How long the need must stay lower."),
            click.option(
                "--scale-by-utilisation", type=float, help="To compare: by a threshold of busy time, such as 0.7, as an HPA does."
            ),
        )
    ):
        command = option(command)
    return command


def failures_of(flags: dict[str, Any]) -> FailureSpec | None:
    """None when nothing was asked to die. Raises InvalidConfig."""
    planned = []
    for text in flags["fails"]:
        at, colon, worker = text.partition(":")
        if not colon or not worker:
            raise InvalidConfig(f"--fail {text!r} should be TIME:WORKER, as in 90s:decode-0-0")
        planned.append(Failure(parse_seconds(at), worker))
    mtbf_s = parse_seconds(flags["mtbf"]) if flags["mtbf"] else None
    return FailureSpec(tuple(planned), mtbf_s, parse_seconds(flags["restart"])) if planned or mtbf_s else None


def autoscale_of(flags: dict[str, Any]) -> AutoscaleSpec | None:
    """None when no pool scales. Raises InvalidConfig."""
    down_after_s = parse_seconds(flags["scale_down_after"])
    prefill, decode = (_policy(name, flags[name], down_after_s) for name in ("scale_prefill", "scale_decode"))
    if prefill is None and decode is None:
        if flags["scale_by_utilisation"] is not None:
            raise InvalidConfig("--scale-by-utilisation needs bounds: add --scale-prefill or --scale-decode, as in 1-4")
        return None
    return AutoscaleSpec(
        prefill,
        decode,
        parse_seconds(flags["scale_every"]),
        parse_seconds(flags["scale_start"], allow_zero=True),
        flags["scale_by_utilisation"],
    )


def _policy(name: str, text: str | None, down_after_s: float) -> AutoscalePolicy | None:
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not dash or not low.isdigit() or not high.isdigit():
        raise InvalidConfig(f"--{name.replace('_', '-')} {text!r} should be MIN-MAX, as in 1-4")
    return AutoscalePolicy(int(low), int(high), down_cooldown_s=down_after_s)
