"""What `shoal serve` checks before it starts anything. Knows configuration, model files and ports; starts no process."""

import socket
from importlib.util import find_spec
from pathlib import Path

from shoal.config.serve import ServeConfig
from shoal.config.tokens import read_tokens
from shoal.config.worker import NODE, Pool
from shoal.controller.room import check_memory
from shoal.engine.affinity import check_cpus, check_threads
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
        raise InvalidConfig(f"`shoal serve` needs {', '.join(missing)}; run `pip install -e '.[serve]'`")
    from shoal.engine.kernels.cpu import named_instructions  # brings torch

    named_instructions()
    model = open_model(config.model, config.adapter)
    shape = model.config.shape
    for pool in config.pools:
        worker = config.worker(pool)
        try:
            policies = worker.allowed_policies(shape.num_layers)
            if model.adapter is not None and not config.adapter_any_visibility:
                model.adapter.check_visibilities(policies, shape.num_layers)
            worker.pool_blocks(shape)
            worker.check_entries(shape)
        except InvalidConfig as error:
            text = str(error).replace("allowed_visibilities", "--visibilities").replace("kv_memory_bytes", "--kv-memory")
            raise InvalidConfig(text) from error
    if not config.ray_address:
        check_threads(config.threads_per_worker)
        check_cpus((*config.cpus(Pool.PREFILL), *config.cpus(Pool.DECODE)))
    _check_gpus(config)
    _check_router(config, model)
    server_credentials(config.tls)
    ClusterLink(config.cluster)
    if config.tokens_file:
        read_tokens(config.tokens_file)
    check_memory(config, config.prefill_workers + config.decode_workers)
    for flag, listen in (("--listen", config.listen), ("--http-listen", config.http_listen)):
        if listen and Address.parse(listen).is_wildcard and not config.allow_wildcard:
            raise InvalidConfig(f"{flag} {listen} means every interface; name one, or add --allow-wildcard")
    if config.ray_address:
        check_reachable(config.ray_address, "--ray-address")
    _check_doors(config)
    if config.worker_host == NODE and not (config.ray_address and config.controller_listen):
        raise InvalidConfig(
            "--worker-host node lets each worker bind its own node: it needs --ray-address and --controller-listen "
            "with the address of this machine that routers reach"
        )
    if Address(config.worker_host, 0).is_wildcard or ":" in config.worker_host:
        raise InvalidConfig(f"--worker-host {config.worker_host!r} must name one IPv4 interface, as in 127.0.0.1, or be node")
    check_port(config.own_host, 0, "--worker-host")
    for metrics in config.metrics_addresses.values():
        host, _, port = metrics.rpartition(":")
        if host != NODE:  # else on a machine that we do not see
            check_port(host, int(port), "--metrics-port")
    return model


def context_note(config: ServeConfig, model: ModelFiles) -> str:
    """What to know where a decode worker's KV pool holds less than one request may ask for; "" where it holds it."""
    shape, worker = model.config.shape, config.worker(Pool.DECODE)
    num_tokens, context = worker.pool_tokens(shape), config.max_context_tokens or shape.max_context
    if num_tokens >= context:
        return ""
    return (
        f"note: a decode worker's KV pool holds {num_tokens} tokens at full depth, and one request may have {context}. Those "
        f"that name no max_tokens ask for all of it and are refused: give --max-context-tokens {num_tokens}, or more --kv-memory"
    )


def _check_doors(config: ServeConfig) -> None:
    """Each router's ports are free and its own."""
    (host, port), http = config.listen_address, config.http_address
    if http is not None and http[0] == host and port and abs(http[1] - port) < config.routers:
        words = "is what --listen has" if config.routers == 1 else f"is too near --listen for {config.routers} routers"
        raise InvalidConfig(f"--http-listen {config.http_listen} {words}; give it a port of its own")
    for flag, address in (("--listen", config.listen_address), ("--http-listen", http)):
        if address is not None:
            for index in range(config.routers if address[1] else 1):
                check_port(address[0], address[1] + index, flag)
    if config.controller_listen:
        controller = Address.parse(config.controller_listen, "--controller-listen")
        if controller.is_wildcard:
            raise InvalidConfig(f"--controller-listen {controller} means every interface; name one")
        if not controller.port:
            raise InvalidConfig("--controller-listen must name a port; without the flag a free one is taken")
        check_port(controller.host, controller.port, "--controller-listen")


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
    policies = dict.fromkeys(Visibility.parse(text).resolve(model.config.shape.num_layers).policy for text in config.visibilities)
    try:
        config.shadow.check_policies(policies)
    except InvalidConfig as error:
        text = str(error).replace("shadow_rate", "--shadow-rate").replace("which visibilities", "which --visibilities")
        raise InvalidConfig(text.replace("and visibilities", "and --visibilities")) from error
    uses_default = any(Visibility.parse(text).kind is VisibilityKind.SPEED for text in config.visibilities)
    if uses_default and encoder.has_chat_template and encoder.num_generation_tokens > config.max_boundary_tokens:
        raise InvalidConfig(
            f"the chat template's generation prompt has {encoder.num_generation_tokens} tokens, the default boundary of `speed`; "
            f"raise --max-boundary-tokens to {encoder.num_generation_tokens} or more"
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
