"""`shoal generate`: a prompt in, an answer on stdout as it comes, figures on stderr."""

import sys
from typing import Any

import click

from shoal.cli.failure import told_in_one_line
from shoal.cli.server_options import Server, server_options
from shoal.cli.stats import print_stats
from shoal.client import Chunk, Completion, Image, Sampling
from shoal.errors import InvalidRequest
from shoal.types import Priority


@click.command()
@click.argument("prompt", required=False)
@server_options
@click.option("--visibility", "-v", metavar="TEXT", help="full, speed:22, pop:20, …; default: the server's first.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--token-ids", metavar="IDS", help="Token ids instead of a prompt, as in 1,4093,198.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="A picture to ask about; may be repeated.")
@click.option("--max-tokens", "-n", type=int, help="Default: to the context limit.")
@click.option("--temperature", "-t", type=float, help="Default: 0, greedy.")
@click.option("--top-p", type=float, help="Default: 1.")
@click.option("--top-k", type=int, help="Default: 0, all.")
@click.option("--seed", type=int, help="Default: drawn, and shown by --stats.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token.")
@click.option("--priority", type=click.Choice([str(name) for name in Priority]), help="Its class where requests wait.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Give up after this long.")
@click.option("--stats", is_flag=True, help="Show times, bytes on the wire and KV held.")
def generate(
    prompt: str | None,
    server: Server,
    visibility: str | None,
    system: str | None,
    raw: bool,
    token_ids: str | None,
    images: tuple[str, ...],
    priority: str | None,
    timeout_s: float | None,
    stats: bool,
    **sampling: Any,
) -> None:
    """Stream the answer to PROMPT (- reads it from stdin).

    PROMPT is one user message for the model's chat template, unless --raw.

    \b
    shoal generate "Why do fish swim in shoals?" --visibility speed:22 --stats
    shoal generate "What is this?" --image photo.jpg
    echo "Once upon a time" | shoal generate - --raw --max-tokens 40
    """
    with told_in_one_line():
        if prompt == "-":
            prompt = sys.stdin.read()
        if prompt is not None and token_ids is not None:
            raise InvalidRequest("give either a prompt or --token-ids, not both")
        if prompt is None and token_ids is None:
            raise InvalidRequest('give a prompt, as in: shoal generate "Why do fish swim in shoals?"')
        with server.connect() as client:
            events = client.generate(
                prompt,
                system=system,
                raw=raw,
                token_ids=None if token_ids is None else _read_ids(token_ids),
                images=[Image.read(path) for path in images],
                sampling=Sampling(**sampling),
                visibility=visibility,
                priority=priority or "",
                timeout_s=timeout_s,
            )
            for event in events:
                if isinstance(event, Chunk):
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                else:
                    _finish(event, stats)


def _finish(done: Completion, stats: bool) -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    for notice in done.notices:
        print(f"notice: {notice}", file=sys.stderr)
    if stats:
        print_stats(done)


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(f"--token-ids {text!r} must be numbers separated by commas, as in 1,4093,198") from None
