"""`shoal token`: makes a token for a tenant and the entry that lets it in. The token is shown once and kept nowhere."""

import os
from pathlib import Path

import click

from shoal.cli.failure import told_in_one_line
from shoal.config.tokens import TokenEntry, hash_token, new_token, read_tokens
from shoal.errors import InvalidConfig
from shoal.types import Priority


@click.command()
@click.argument("tenant")
@click.option("--tokens-file", "-f", type=click.Path(path_type=Path), metavar="FILE", help="Add the entry to this file.")
@click.option("--max-concurrent", default=0, metavar="N", help="Requests running at once; 0: no limit.")
@click.option("--requests-per-minute", default=0, metavar="N", help="Requests begun within any 60 s; 0: no limit.")
@click.option(
    "--max-priority",
    default=str(Priority.NORMAL),
    type=click.Choice([str(name) for name in Priority]),
    help="Highest class it may ask.",
)
def token(tenant: str, tokens_file: Path | None, max_concurrent: int, requests_per_minute: int, max_priority: str) -> None:
    """Make a token for TENANT: the token on stdout, once; its hash into the tokens file (on stderr without one).

    A router takes the changed file within a second. A tenant may have several tokens, with the same limits.

    \b
    shoal token acme --tokens-file tokens.yaml --max-concurrent 8 --requests-per-minute 600
    shoal serve --tokens-file tokens.yaml --tls-cert router.pem --tls-key router.key
    """
    with told_in_one_line():
        made = new_token()
        entry = TokenEntry(tenant, hash_token(made), max_concurrent, requests_per_minute, Priority(max_priority))
        if tokens_file is None:
            click.echo(entry.to_yaml(), err=True, nl=False)
        else:
            _add(tokens_file, entry)
        click.echo(made)


def _add(path: Path, entry: TokenEntry) -> None:
    """Write the whole file anew beside the old one, see that it can be read, and put it in its place."""
    old = path.read_text(encoding="utf-8") if path.exists() else "# Who may call the router; `shoal token` adds entries.\n"
    new = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(old + ("" if old.endswith("\n") else "\n") + entry.to_yaml())
            read_tokens(new)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    except FileExistsError:
        raise InvalidConfig(f"{new} exists: another `shoal token` is writing, or one was killed; remove it") from None
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror}") from None
