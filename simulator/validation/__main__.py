"""`python -m shoal.simulator.validation`: prints the validation tables. Knows where the measurements may lie."""

from pathlib import Path

import click

from shoal.simulator.validation.measured import summaries
from shoal.simulator.validation.published import comparisons
from shoal.simulator.validation.report import constants_section, measured_section, published_section


@click.command()
@click.option(
    "--data",
    envvar="SHOAL_VALIDATION_DATA",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of measurement files (also SHOAL_VALIDATION_DATA); without it their tables are skipped.",
)
def main(data: Path | None) -> None:
    """Print every published figure beside ours, the fitted constants, and the errors against measurements."""
    click.echo("## Published figures\n")
    click.echo(published_section(comparisons()))
    click.echo("\n## Constants\n")
    click.echo(constants_section())
    click.echo("\n## Measurements\n")
    if data is None:
        click.echo("Skipped: no folder of measurements (--data FOLDER, or SHOAL_VALIDATION_DATA).")
        return
    click.echo(measured_section(summaries(data)))


if __name__ == "__main__":
    main()
