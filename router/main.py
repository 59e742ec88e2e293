"""The router's command line: flags to settings, signals to an orderly end."""

import asyncio
import contextlib
import select
import signal
import sys
from typing import Any, Final

import click
import uvloop

from shoal.config.disaggregation import LOCAL_CACHED_SHARE, LOCAL_PREFILL_TOKENS
from shoal.config.images import ImageLimits
from shoal.config.logs import FORMATS, LEVELS, configure_logging
from shoal.config.router import HTTP_MAX_BODY_MB, RouterConfig, body_bytes
from shoal.config.shadow import ShadowConfig
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.errors import InvalidRequest, ShoalError
from shoal.router.app import Router
from shoal.rpc.open_files import raise_open_files
from shoal.rpc.tracing import configure_tracing
from shoal.visibility import Visibility

SERVING: Final = "router can serve"  # printed once, for whoever started this process
BEAT: Final = "router moves"  # printed again and again with --beat-s
_SHADOW: Final = ShadowConfig()
_IMAGES: Final = ImageLimits()


@click.command(name="router", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="Where clients call; port 0 picks a free one.")
@click.option("--http-listen", metavar="HOST:PORT", help="Serve OpenAI's API over HTTP there; port 0 picks a free one.")
@click.option("--health-listen", metavar="HOST:PORT", help="gRPC health alone, without TLS, for an orchestrator's probes.")
@click.option("--http-max-body-mb", default=HTTP_MAX_BODY_MB, help="Largest body of an HTTP request, in MB.")
@click.option("--controller", metavar="HOST:PORT", help="The controller that publishes where the workers are.")
@click.option("--worker", "workers", multiple=True, metavar="POOL=HOST:PORT", help="A fixed worker instead; repeat per worker.")
@click.option("--model", default="smollm2-135m", help="Name or path; only its configuration and tokenizer are read.")
@click.option(
    "--visibilities", default="full", metavar="LIST", help="Allowed, comma separated, as in full,speed:22; first = default."
)
@click.option("--max-boundary-tokens", default=64, help="Longest boundary a request may ask for.")
@click.option("--max-context", type=int, help="Tokens of prompt and answer together, if less than the model's.")
@click.option("--max-retries", default=1, help="Other attempts after a worker failed.")
@click.option("--max-wait-s", default=60.0, help="Refuse at once what would wait longer for its start; 0: never.")
@click.option("--local-prefill-tokens", default=LOCAL_PREFILL_TOKENS, help="Fewer uncached prompt tokens run on decode; 0: none.")
@click.option("--local-cached-share", default=LOCAL_CACHED_SHARE, help="So do prompts cached on decode by this share; 1: none.")
@click.option("--prefill-fallback", is_flag=True, help="And all others while no prefill worker is live.")
@click.option("--shadow-rate", default=_SHADOW.rate, help="Share of finished shallow requests replayed at full depth; 0: none.")
@click.option(
    "--shadow-min-agreement", default=_SHADOW.min_agreement, help="Serve full below this share of equal tokens; 0: none."
)
@click.option("--shadow-max-kl", default=_SHADOW.max_kl, help="Serve full above so many nats per token; 0: no bound.")
@click.option("--shadow-window", default=_SHADOW.window, help="Replays that are judged together, the latest.")
@click.option("--shadow-min-samples", default=_SHADOW.min_samples, help="Replays before anything is judged.")
@click.option("--shadow-hysteresis", default=_SHADOW.hysteresis, help="How far inside its bounds one must be to come back.")
@click.option("--shadow-cool-down-s", default=_SHADOW.cool_down_s, help="Least time at full depth.")
@click.option("--max-images", default=_IMAGES.max_images, help="Images of one request; 0: none.")
@click.option("--max-image-mb", default=_IMAGES.max_image_mb, help="Largest file of an image, in MB.")
@click.option("--max-images-mb", default=_IMAGES.max_images_mb, help="All files of a request together, in MB.")
@click.option("--max-image-megapixels", default=_IMAGES.max_image_megapixels, help="Most pixels of an image, in millions.")
@click.option("--flush-ms", default=20.0, help="How long tokens may wait to share a message.")
@click.option("--max-request-s", default=3600.0, help="Deadline of requests that bring none.")
@click.option("--name", default="router", help="What its log lines are signed with.")
@click.option("--beat-s", default=0.0, help="Print a line each so many seconds, for whoever watches; 0: never.")
@click.option("--drain-s", default=30.0, help="How long running requests may go on after SIGTERM.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics at http://HOST:PORT/metrics.")
@click.option("--allow-wildcard", is_flag=True, help="Permit addresses that listen on every interface.")
@click.option("--tls-cert", default="", metavar="PEM", help="TLS on both doors: the router's certificate, with its chain.")
@click.option("--tls-key", default="", metavar="PEM", help="The key of --tls-cert.")
@click.option("--tls-ca", default="", metavar="PEM", help="Who signs clients' certificates.")
@click.option("--tls-require-client-cert", is_flag=True, help="Answer only clients with a certificate from --tls-ca.")
@click.option("--tokens-file", metavar="FILE", help="Answer only callers with a token of this file (`shoal token`).")
@click.option("--cluster-secret-file", default="", metavar="FILE", help="What the cluster's processes know each other by.")
@click.option("--cluster-tls-cert", default="", metavar="PEM", help="Mutual TLS to workers and controller: our certificate.")
@click.option("--cluster-tls-key", default="", metavar="PEM", help="The key of --cluster-tls-cert.")
@click.option("--cluster-tls-ca", default="", metavar="PEM", help="The cluster's own CA.")
@click.option("--log-level", default="info", type=click.Choice(LEVELS))
@click.option("--log-format", default="text", type=click.Choice(FORMATS), help="Readable lines, or one JSON Any a line.")
def command(name: str, beat_s: float, log_level: str, log_format: str, **settings: Any) -> None:
    """Serve Shoal's public APIs over a pool of prefill and decode workers.

    SIGTERM and Ctrl-C: health says NOT_SERVING, running requests finish (up to --drain-s), then the process ends.
    """
    configure_logging(log_level, name, log_format)
    configure_tracing(name)
    try:
        config = read_settings(**settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, beat_s))
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def read_settings(visibilities: str, flush_ms: float, http_max_body_mb: float, **settings: Any) -> RouterConfig:
    """What the flags say, those of the process left out. Raises ShoalError when they cannot work."""
    tls = TlsConfig(*(settings.pop(f"tls_{name}") for name in ("cert", "key", "ca", "require_client_cert")))
    cluster = ClusterConfig(*(settings.pop(f"cluster_{n}") for n in ("secret_file", "tls_cert", "tls_key", "tls_ca")))
    shadow = ShadowConfig.read({name: settings.pop(name) for name in list(settings) if name.startswith("shadow_")})
    images = ImageLimits.read({name: settings.pop(name) for name in list(settings) if name.startswith("max_image")})
    return RouterConfig(
        images=images,
        visibilities=parse_visibilities(visibilities),
        flush_s=flush_ms / 1e3,
        http_max_body_bytes=body_bytes(http_max_body_mb),
        tls=tls,
        cluster=cluster,
        shadow=shadow,
        **settings,
    )


def parse_visibilities(text: str) -> tuple[Visibility, ...]:
    """A comma-separated allow-list. Raises InvalidRequest that names the entry."""
    entries = [part.strip() for part in text.split(",") if part.strip()]
    if not entries:
        raise InvalidRequest("the list of visibilities is empty; name at least one, as in full,speed:22")
    return tuple(Visibility.parse(entry) for entry in entries)


async def run(config: RouterConfig, beat_s: float = 0.0) -> None:
    """Serve until SIGTERM or SIGINT. Prints one line with the address once it listens."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    raise_open_files()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    router = Router(config)
    address = await router.start()
    if router.http_address is not None:
        print(f"router serving HTTP on {router.http_address}", flush=True)
    print(f"router listening on {address}", flush=True)
    telling = asyncio.gather(_tell_serving(router), _beat(beat_s))
    waits = {asyncio.create_task(stopping.wait()), asyncio.create_task(router.failed())}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await router.stop(config.drain_s if stopping.is_set() else 0.0)
    telling.cancel()  # only now: one that drains still moves
    with contextlib.suppress(asyncio.CancelledError):
        await telling
    for task in done:
        task.result()


async def _tell_serving(router: Router) -> None:
    await router.has_served.wait()
    print(SERVING, flush=True)


async def _beat(interval_s: float) -> None:
    """Show that the event loop turns. A reader who is away must not stop it: then nothing is written."""
    while interval_s > 0:
        if select.select([], [sys.stdout], [], 0)[1]:
            print(BEAT, flush=True)
        await asyncio.sleep(interval_s)
