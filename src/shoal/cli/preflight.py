"""What `shoal serve` checks before it starts anything. Knows configuration, model files and ports; starts no process."""

import socket
from importlib.util import find_spec
from pathlib import Path

from shoal.config.serve import ServeConfig
from shoal.config.tokens import read_tokens
from shoal.config.worker import Pool
from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, load_tokenizer, open_model
from shoal.router.text import PromptEncoder
from shoal.rpc import Address, ClusterLink
from shoal.rpc.tls import server_credentials
from shoal.visibility import Visibility, VisibilityKind


def check(config: ServeConfig) -> ModelFiles:
    """Open the model and see that every worker's configuration fits it and that the ports are free.

    Raises InvalidConfig that says what to change.
    """
    missing = [name for name in ("torch", "ray", "psutil") if find_spec(name) is None]
    if missing:
        raise InvalidConfig(f"`shoal serve` needs {', '.join(missing)}; run `pip install 'shoal[serve]'`")
    model = open_model(config.model)
    shape = model.config.shape
    for pool in Pool:
        worker = config.worker(pool)
        try:
            worker.allowed_policies(shape.num_layers)
            worker.pool_blocks(shape)
            worker.check_entries(shape)
        except InvalidConfig as error:
            text = str(error).replace("allowed_visibilities", "--visibilities").replace("kv_memory_bytes", "--kv-memory")
            raise InvalidConfig(text) from error
    _check_gpus(config)
    _check_router(config, model)
    server_credentials(config.tls)
    ClusterLink(config.cluster)
    if config.tokens_file:
        read_tokens(config.tokens_file)
    _check_memory(config)
    for flag, listen in (("--listen", config.listen), ("--http-listen", config.http_listen)):
        if listen and Address.parse(listen).is_wildcard and not config.allow_wildcard:
            raise InvalidConfig(f"{flag} {listen} means every interface; name one, or add --allow-wildcard")
    if config.ray_address:
        check_reachable(config.ray_address, "--ray-address")
    host, port = config.listen_address
    check_port(host, port, "--listen")
    if config.http_address is not None:
        if config.http_address == config.listen_address and port:
            raise InvalidConfig(f"--http-listen {config.http_listen} is what --listen has; give it a port of its own")
        check_port(*config.http_address, "--http-listen")
    if Address(config.worker_host, 0).is_wildcard or ":" in config.worker_host:
        raise InvalidConfig(f"--worker-host {config.worker_host!r} must name one IPv4 interface, as in 127.0.0.1")
    check_port(config.worker_host, 0, "--worker-host")
    for metrics in config.metrics_addresses.values():
        check_port(config.worker_host, int(metrics.rpartition(":")[2]), "--metrics-port")
    return model


def _check_gpus(config: ServeConfig) -> None:
    """NCCL needs a GPU for each worker: on this machine, unless Ray brings others."""
    num_workers, num_gpus = config.prefill_workers + config.decode_workers, len(list(Path("/dev").glob("nvidia[0-9]*")))
    if config.transfer_backend == "nccl" and not config.ray_address and num_gpus < num_workers:
        raise InvalidConfig(
            f"--transfer-backend nccl needs a GPU for each of {num_workers} workers and this machine has {num_gpus}; use gloo "
            f"or join a Ray cluster that has them with --ray-address"
        )


def _check_router(config: ServeConfig, model: ModelFiles) -> None:
    """What only the router needs: a tokenizer, a context within the model's, a boundary that fits the chat template."""
    encoder, limit = PromptEncoder(load_tokenizer(model)), model.config.shape.max_context
    if config.max_context_tokens > limit:
        raise InvalidConfig(f"--max-context-tokens {config.max_context_tokens} exceeds the model's own {limit}")
    uses_default = any(Visibility.parse(text).kind is VisibilityKind.SPEED for text in config.visibilities)
    if uses_default and encoder.has_chat_template and encoder.num_generation_tokens > config.max_boundary_tokens:
        raise InvalidConfig(
            f"the chat template's generation prompt has {encoder.num_generation_tokens} tokens, the default boundary of `speed`; "
            f"raise --max-boundary-tokens to {encoder.num_generation_tokens} or more"
        )


def _check_memory(config: ServeConfig) -> None:
    """Pools on this machine's own memory: it is taken as they fill, so too much would show only under load."""
    if config.ray_address or config.transfer_backend == "nccl":
        return
    import psutil  # here: part of the `serve` extra

    num_workers, total = config.prefill_workers + config.decode_workers, psutil.virtual_memory().total
    if num_workers * config.kv_memory > total:
        raise InvalidConfig(
            f"the KV pools of {num_workers} workers may take {num_workers * config.kv_memory / 1e9:.1f} GB, this machine has "
            f"{total / 1e9:.1f} GB; lower --kv-memory"
        )


def check_port(host: str, port: int, flag: str) -> None:
    """Raise InvalidConfig when `host:port` cannot be bound now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        words = error.strerror or str(error)
        change = "choose another port, or stop what holds this one" if port else "name an address of this machine"
        raise InvalidConfig(f"{flag} {host}{f':{port}' if port else ''}: {words}; {change}") from error


def check_reachable(address: str, flag: str, timeout_s: float = 3.0) -> None:
    """Raise InvalidConfig when nothing listens at `host:port`."""
    target = Address.parse(address, flag)
    try:
        socket.create_connection((target.host, target.port), timeout_s).close()
    except OSError as error:
        words = error.strerror or str(error)
        raise InvalidConfig(f"{flag} {address}: {words}; start that Ray, or correct the address") from error


def free_port(host: str) -> int:
    """A port that nothing holds now."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
