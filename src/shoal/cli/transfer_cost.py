"""`shoal transfer-cost`: what the handoff of a prompt costs under each visibility. Translates flags; computes nothing."""

from collections.abc import Sequence
from pathlib import Path

import click

from shoal.cli.planning import (
    catalogues,
    format_option,
    machine_of,
    model_of,
    model_options,
    reports_errors,
    show,
    split_list,
)
from shoal.errors import InvalidConfig
from shoal.simulator.transfer_table import default_visibilities, transfer_rows
from shoal.simulator.units import parse_rate, parse_tokens
from shoal.visibility import Visibility

_HEADINGS = {
    "prompt_tokens": "prompt",
    "link": "link",
    "visibility": "visibility",
    "wire_bytes": "bytes",
    "saved_share": "saved",
    "prefill_ms": "prefill ms",
    "serial_ms": "serial ms",
    "exposed_ms": "exposed ms",
    "ttft_ms": "TTFT ms",
    "decode_kv_bytes": "decode KV",
    "link_share": "link share",
}


@click.command("transfer-cost")
@model_options
@click.option("--link", "link_names", multiple=True, required=True, help="Catalogue name or bandwidth; several make a sweep.")
@click.option("--prompt", "prompts", multiple=True, required=True, help="Tokens, such as 32k; several make a sweep.")
@click.option("--visibility", "texts", multiple=True, help="full, speed:K, pop:K, pop:K:late; default: a comparison.")
@click.option("--cached", default="0", show_default=True, help="Prompt tokens that decode already holds, such as 8k.")
@click.option("--chunk", help="Prefill chunk in tokens; default: the prompt in one.")
@click.option("--rate", help="Requests per second over this link, for its load; default: one prefill worker that never idles.")
@click.option("--nics", type=int, help="Network interfaces side by side; default: one per GPU of the worker.")
@format_option
@reports_errors
def transfer_cost(
    model_name: str,
    gpu_name: str | None,
    tp: int,
    profile_name: str | None,
    changes: Sequence[str],
    weights: str,
    kv: str,
    catalogue: Path | None,
    link_names: Sequence[str],
    prompts: Sequence[str],
    texts: Sequence[str],
    cached: str,
    chunk: str | None,
    rate: str | None,
    nics: int | None,
    output: str,
) -> None:
    """Bytes, serial and exposed milliseconds, and the link's load for one prompt's KV transfer.

    \b
    shoal transfer-cost --model llama-3.1-8b --link 100gbe --prompt 32k
    shoal transfer-cost --model llama-3.1-8b --link 10gbe,100gbe --prompt 2k,32k,128k --visibility full,speed:24 --format csv
    """
    names = catalogues(catalogue)
    model = model_of(names, model_name, weights, kv)
    machine = machine_of(names, gpu_name, tp, profile_name, changes)
    if nics is not None and nics < 1:
        raise InvalidConfig(f"--nics {nics} makes no sense; use 1 or more")
    visibilities = [Visibility.parse(text) for text in split_list(texts)] or default_visibilities(model.shape.num_layers)
    rows = transfer_rows(
        model,
        visibilities,
        [names.link(name) for name in split_list(link_names)],
        [parse_tokens(text) for text in split_list(prompts)],
        machine,
        num_cached=0 if cached == "0" else parse_tokens(cached),
        chunk_tokens=parse_tokens(chunk) if chunk else None,
        rate=parse_rate(rate) if rate else None,
        num_nics=nics,
    )
    title = f"{model.name} on {tp} × {machine.gpu.name}, profile {machine.profile.name}, KV in {kv}"
    about = {
        "model": model.name,
        "model_source": model.source,
        "gpu": machine.gpu.name,
        "tensor_parallel": tp,
        "profile": machine.profile.name,
        "profile_source": machine.profile.source,
        "weights": weights,
        "kv": kv,
    }
    show(rows, output, title=title, headings=_HEADINGS, about=about)


if __name__ == "__main__":
    transfer_cost()
