"""Reads a container's command line as Shoal's own commands do. Knows which module has which command; starts nothing."""

import importlib
import re
from typing import Any, Final

import click

from infra.checks.charts import Object
from shoal.cli.main import cli

MODULES: Final = {"shoal.router": "shoal.router.main:command", "shoal.launch.controller": "shoal.launch.controller:main"}
POD: Final = {"POD_IP": "10.0.0.7", "POD_NAME": "pod-7"}


def parsed(container: Object) -> tuple[str, dict[str, Any]]:
    """What runs, and its options as click reads them. Fails for an unknown flag, a value of the wrong kind, an unset variable."""
    command, arguments = container["command"], [_expanded(arg) for arg in container["args"]]
    if command[:2] == ["python", "-m"]:
        module, _, name = MODULES[command[2]].partition(":")
        target: click.Command = getattr(importlib.import_module(module), name)
        return command[2], target.make_context(command[2], arguments).params
    assert command == ["shoal"]
    context = click.Context(cli)
    found = cli.get_command(context, arguments[0])
    assert found is not None, arguments[0]
    return f"shoal {arguments[0]}", found.make_context(arguments[0], arguments[1:], parent=context).params


def _expanded(argument: str) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: POD[match[1]], argument)
