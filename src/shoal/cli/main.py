"""The `shoal` command: a table of commands, each imported when it is run."""

import importlib
from typing import Final

import click

import shoal
from shoal.cli.failure import EXIT_CODES_HELP
from shoal.cli.version import VERSION_TEXT

COMMANDS: Final[dict[str, tuple[str, str]]] = {  # name: (module:attribute, what it does)
    "serve": ("shoal.cli.serve:serve", "Start a local cluster: controller, workers and a router."),
    "demo": ("shoal.cli.demo:demo", "Start a cluster, stream answers under full, speed and pop, show the figures."),
    "generate": ("shoal.cli.generate:generate", "Stream an answer to the terminal."),
    "info": ("shoal.cli.info:info", "Show a server's model, its allowed visibilities and its workers."),
    "loads": ("shoal.cli.info:loads", "Show what every worker holds now."),
    "health": ("shoal.cli.health:health", "Ask any process of a cluster whether it serves; for probes."),
    "top": ("shoal.cli.top:top", "Show the pools live: what every worker holds, again and again."),
    "scale": ("shoal.cli.scale:scale", "Change how many workers a running cluster has."),
    "restart": ("shoal.cli.scale:restart", "Replace every worker of a running cluster, a few at a time."),
    "autoscale": ("shoal.cli.autoscale:autoscale", "Show what autoscaling decided for each pool, and why."),
    "token": ("shoal.cli.token:token", "Make a token for a tenant."),
    "transfer-cost": ("shoal.cli.transfer_cost:transfer_cost", "What the handoff of a prompt costs under each visibility."),
    "calibrate": ("shoal.cli.calibrate:calibrate", "Measure running workers and fit a profile for planning to them."),
    "models": ("shoal.cli.models:models", "List the models that can be opened by name."),
    "plan": ("shoal.cli.plan:plan", "The cheapest cluster for a workload and its targets, or why there is none."),
    "simulate": ("shoal.cli.simulate:simulate", "Simulate a cluster under a trace or drawn requests."),
    "diagnose": ("shoal.cli.diagnose:diagnose", "Show what each layer is worth to prompts, and choose a prefill depth."),
    "tune": ("shoal.cli.tune:tune", "Tune an adapter under the visibility it will be served with."),
    "corpus": ("shoal.cli.corpus:corpus", "Write training text out of the packages that are installed."),
    "eval": ("shoal.cli.evaluate:evaluate", "Measure what each visibility costs a model in quality."),
    "version": ("shoal.cli.version:version", "Print the version."),
}


class LazyGroup(click.Group):
    """Knows its commands' names and one-line help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


@click.version_option(shoal.__version__, message=VERSION_TEXT)
@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES_HELP)
def cli() -> None:
    """Shoal serves language models with shallow prefill and deep decode."""


def main() -> None:
    """Entry point of the `shoal` script."""
    cli(prog_name="shoal")


if __name__ == "__main__":
    main()
