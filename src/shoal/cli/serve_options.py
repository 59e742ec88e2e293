"""The flags of `shoal serve`, one for each field of ServeConfig, and how they join a YAML file. Knows no process."""

import dataclasses
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import click

from shoal.config.reading import read_yaml
from shoal.config.serve import ServeConfig
from shoal.errors import InvalidConfig

HELP: Final[dict[str, str]] = {
    "model": "A known model (`shoal models`), a .gguf file or a Hugging Face folder.",
    "adapter": "Folder of a LoRA adapter for the model (`shoal tune` makes one), merged into its weights at load.",
    "adapter_any_visibility": "Serve the adapter under other visibilities than the one it was tuned for, too.",
    "dtype": "Weights, hidden states and KV: float32 or bfloat16.",
    "visibilities": "Visibilities that requests may choose, the default first: full,speed:22,pop:20.",
    "max_boundary_tokens": "The largest boundary a request may choose.",
    "listen": "host:port where clients connect; port 0 picks a free one.",
    "http_listen": "host:port of OpenAI's API over HTTP, as in 127.0.0.1:8000; none unless given.",
    "http_max_body_mb": "Largest body of an HTTP request, in MB; base64 makes an image a third larger.",
    "routers": "Number of routers, on the ports of --listen and --http-listen and those that follow.",
    "controller_listen": "host:port of the controller, for more routers and `shoal scale`; a free port unless given.",
    "allow_wildcard": "Permit --listen and --http-listen on every interface, as in 0.0.0.0:50051.",
    "prefill_workers": "Number of prefill workers.",
    "decode_workers": "Number of decode workers.",
    "colocated": "No prefill pool: decode workers prefill every prompt themselves, and nothing is transferred.",
    "local_prefill_tokens": "Prompts with fewer uncached prefill tokens are prefilled on the decode worker; 0: none.",
    "local_cached_share": "So are prompts of which decode has cached at least this share; 1: none.",
    "prefill_fallback": "While no prefill worker is live, decode prefills everything, declared; else it is UNAVAILABLE.",
    "shadow_rate": "Share of finished shallow requests replayed at full depth, in the background, as in 0.01; 0: none.",
    "shadow_min_agreement": "Below this share of tokens that agree with full depth, full is served instead; 0: no bound.",
    "shadow_max_kl": "Above so many nats per token of divergence, the same; 0: no bound.",
    "shadow_window": "Replays that are judged together, the latest.",
    "shadow_min_samples": "Replays before anything is judged.",
    "shadow_hysteresis": "How far inside its bounds a visibility must be to be served again: 0 just inside, 1 perfect.",
    "shadow_cool_down_s": "Seconds at full depth, at least.",
    "threads_per_worker": "CPU threads of each worker.",
    "prefill_cpus": "CPUs that every prefill worker's threads are kept to, as in 0 or 0-3,8.",
    "decode_cpus": "The same for decode workers.",
    "kv_memory": "KV pool of each worker, as in 512MiB.",
    "block_size": "Tokens in one KV block.",
    "token_budget": "Tokens a worker runs in one step; the size of a prefill chunk.",
    "prefix_cache": "Keep the KV of prompts and answers for requests that begin alike, until blocks are needed.",
    "preemption": "Reserve KV for the next tokens only; when there is none left, who came last gives way and resumes later.",
    "max_requests": "Requests that one worker runs together.",
    "max_wait_s": "Refuse at once a request that would wait longer for its start; 0: none.",
    "max_context_tokens": "Prompt and answer together; 0: the model's own limit.",
    "max_images": "Images of one request; 0: none.",
    "max_image_mb": "Largest file of an image, in MB.",
    "max_images_mb": "All files of a request's images together, in MB.",
    "max_image_megapixels": "Most pixels of an image, in millions.",
    "transfer_backend": "How KV crosses: auto, gloo, nccl, shared-memory (on one machine), or ordered-gloo (a double for tests).",
    "worker_host": "The interface that workers, controller and metrics bind to; node: each worker its own Ray node's address.",
    "worker_port": "One gRPC port for all workers, each on a node of its own (--worker-host node); 0: any free one.",
    "worker_metrics_port": "Likewise for the workers' metrics; 0: numbered on from --metrics-port.",
    "ray_address": "Join this Ray instead of starting one.",
    "ray_namespace": "Ray namespace of the actors; one per Shoal cluster in a shared Ray.",
    "pool_labels": "Place workers on Ray nodes labelled pool=prefill and pool=decode.",
    "keep_workers": "Leave workers running on SIGTERM, for the next controller to adopt (with --ray-address).",
    "metrics_port": "Metrics of the router on this port, of controller and workers on the next ones; 0: none.",
    "start_timeout_s": "Seconds a worker may take to become ready.",
    "hang_timeout_s": "Seconds without SERVING as the answer to a health check after which a worker is replaced.",
    "grace_s": "Seconds running requests may take to finish after Ctrl-C or SIGTERM.",
    "log_level": "debug, info, warning or error.",
    "log_format": "text, or json: one object a line.",
    "tls_cert": "TLS on both doors: the router's certificate (PEM), with its chain.",
    "tls_key": "The key of --tls-cert.",
    "tls_ca": "Who signs clients' certificates (PEM), with --tls-require-client-cert.",
    "tls_require_client_cert": "Answer only clients with a certificate from --tls-ca.",
    "tokens_file": "Answer only callers with a token of this file (`shoal token` makes one).",
    "cluster_secret_file": "What processes of the cluster know each other by (mode 600); made anew unless given.",
    "cluster_tls_cert": "Mutual TLS inside the cluster: a certificate (PEM) with the DNS name shoal-cluster.",
    "cluster_tls_key": "The key of --cluster-tls-cert.",
    "cluster_tls_ca": "The cluster's own CA (PEM): whatever it signs is a member.",
    "autoscale_prefill": "Scale the prefill pool by predicted need between so many workers: MIN-MAX, as in 1-4.",
    "autoscale_decode": "The same of the decode (or colocated) pool.",
    "autoscale_nodes": "Who brings machines for it: fixed (nobody), ray (Ray's autoscaler), kuberay (a RayCluster is patched).",
    "autoscale_dry_run": "Decide and tell (`shoal autoscale`), change nothing.",
    "chaos": "Permit fault injection through SHOAL_FAULTS (tests only).",
}


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and a flag for each field. Flags that are not given stay None."""
    for field in reversed([field for field in dataclasses.fields(ServeConfig) if field.name in HELP]):
        flag = "--" + field.name.replace("_", "-")
        default = _shown(field.name, field.default)
        text = f"{HELP[field.name]}  [default: {default}]" if default else HELP[field.name]
        if isinstance(field.default, bool):
            command = click.option(f"{flag}/--no-{flag[2:]}", field.name, default=None, help=text)(command)
        else:
            kind = type(field.default) if isinstance(field.default, int | float) and field.name != "kv_memory" else str
            command = click.option(flag, field.name, type=kind, default=None, help=text)(command)
    file = click.Path(path_type=Path, dir_okay=False)
    return click.option("--config", "config_file", type=file, help="YAML file with the same names; flags override it.")(command)


def read_config(config_file: Path | None, flags: dict[str, Any], defaults: dict[str, Any] | None = None) -> ServeConfig:
    """Defaults, then the file, then the flags given. Raises InvalidConfig."""
    values = dict(defaults or {})
    if config_file is not None:
        ServeConfig.from_mapping(file_values := read_yaml(config_file), source=str(config_file))
        values |= {str(key).replace("-", "_"): value for key, value in file_values.items()}
    typed = {name: value for name, value in flags.items() if value is not None}
    in_file = values.keys() - (defaults or {}).keys() - typed.keys()
    try:
        return ServeConfig.from_mapping(values | typed, source="flags")
    except InvalidConfig as error:
        raise InvalidConfig(_as_flags(str(error).removeprefix("flags: "), in_file)) from None


def _as_flags(words: str, in_file: Collection[str]) -> str:
    """An error's words with each knob named as its flag, but those that stand in the file as they stand there."""
    for name in HELP.keys() - in_file:
        is_plain = "_" not in name  # also an English word: only where the sentence begins with it
        pattern = rf"^{name}\b(?!-)" if is_plain else rf"(?<![\w.]){name}\b"
        words = re.sub(pattern, "--" + name.replace("_", "-"), words)
    return words


def _shown(name: str, default: Any) -> str:
    if name == "kv_memory":
        return f"{default >> 20}MiB"
    if isinstance(default, tuple):
        return ",".join(default)
    return "" if default in ("", False) and not (isinstance(default, int) and not isinstance(default, bool)) else str(default)
