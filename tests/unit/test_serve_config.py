import dataclasses
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli.commands import router_arguments, router_places
from shoal.cli.preflight import check, check_port, context_note, free_port
from shoal.cli.serve import serve
from shoal.cli.serve_options import HELP, read_config
from shoal.config.reading import parse_size, read_yaml
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.ray_node import OwnNode
from shoal.errors import InvalidConfig, Unavailable
from shoal.model_files import open_model, write_random_model
from shoal.router.main import command as router
from shoal.router.main import read_settings
from shoal.rpc.hosted import HostedWorker

PROCESS_FLAGS = ("name", "beat_s", "log_level", "log_format")  # not of RouterConfig
OWN_NODES = {
    "worker_host": "node",
    "ray_address": "head:6379",
    "controller_listen": "10.0.0.5:50050",
    "worker_metrics_port": 9400,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder)
    return folder


def test_every_field_has_a_flag_with_help() -> None:
    fields = {field.name for field in dataclasses.fields(ServeConfig)}
    assert set(HELP) == fields - {"transfer", "autoscale"}
    text = CliRunner().invoke(serve, ["--help"], terminal_width=200).output
    for name in HELP:
        assert "--" + name.replace("_", "-") in text


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prefill-workers: 3\nkv_memory: 64MiB\nvisibilities: [full, 'speed:2']\ntransfer: {heartbeat_s: 2}\n")
    config = read_config(file, {"prefill_workers": 2, "listen": None})
    assert (config.prefill_workers, config.kv_memory, config.listen) == (2, 64 << 20, "127.0.0.1:50051")
    assert config.visibilities == ("full", "speed:2")
    assert config.worker(Pool.DECODE).transfer.heartbeat_s == 2.0


def test_an_error_names_a_knob_as_it_was_written(tmp_path: Path) -> None:
    (file := tmp_path / "cluster.yaml").write_text("metrics_port: 65530\nmax_boundary_tokens: 4\n")
    for config_file, flags, words in (
        (None, {"metrics_port": 70000}, "--metrics-port must lie in"),
        (None, {"listen": "nowhere"}, "--listen must be HOST:PORT"),
        (None, {"keep_workers": True}, "--keep-workers needs --ray-address"),
        (None, {"tls_cert": "a.pem"}, "--tls-cert, --tls-key, --tls-ca, --tls-require-client-cert: TLS needs"),
        (file, {"prefill_workers": 9}, "metrics_port 65530 and one port"),
        (file, {"max_boundary_tokens": 0}, "--max-boundary-tokens must be at least 1"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            read_config(config_file, flags)
        assert str(caught.value).startswith(words)


def test_a_configuration_crosses_as_json() -> None:
    config = ServeConfig.from_mapping({"visibilities": "full,pop:3", "transfer": {"max_pairs": 5}, "grace_s": 3})
    assert ServeConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefil_workers": 1}, "did you mean 'prefill_workers'"),
        ({"zzz": 1}, "known keys: model"),
        ({"transfer": {"heart_beat_s": 1}}, "did you mean 'heartbeat_s'"),
        ({"transfer": 3}, "must be a mapping"),
        ({"prefill_workers": 0}, "prefill_workers must be at least 1"),
        ({"colocated": True, "prefill_workers": 1}, "colocated and prefill_workers contradict"),
        ({"colocated": True, "prefill_fallback": True}, "colocated and prefill_fallback contradict"),
        ({"colocated": True, "transfer_backend": "gloo"}, "colocated and transfer_backend contradict"),
        ({"colocated": True, "local_prefill_tokens": 7}, "colocated and local_prefill_tokens contradict"),
        ({"colocated": True, "prefill_cpus": "0"}, "colocated and prefill_cpus contradict"),
        ({"colocated": True, "decode_workers": 0}, "decode_workers must be at least 1"),
        ({"local_prefill_tokens": -1}, "local_prefill_tokens must be 0"),
        ({"local_cached_share": 1.5}, "local_cached_share must lie above 0"),
        ({"shadow_rate": 2.0}, r"shadow_rate must lie in \[0, 1\]"),
        ({"shadow_max_kl": 0.5}, "shadow_max_kl 0.5 has no effect while nothing is replayed"),
        ({"http_max_body_mb": 0.0}, "http_max_body_mb must be a number greater than 0, not 0"),
        ({"http_max_body_mb": float("inf")}, "http_max_body_mb must be a number greater than 0, not inf"),
        ({"decode_cpus": "3-1"}, "decode_cpus: cannot read '3-1' as CPU numbers"),
        ({"prefill_cpus": "a"}, "write them as in 0-3,8"),
        ({"prefill_workers": "two"}, "prefill_workers must be a whole number"),
        ({"prefill_workers": True}, "prefill_workers must be a whole number"),
        ({"kv_memory": "many"}, "cannot read 'many' as a size"),
        ({"dtype": "float16"}, "choose one of float32, bfloat16"),
        ({"transfer_backend": "tcp"}, "choose one of auto, gloo"),
        ({"listen": "50051"}, "HOST:PORT"),
        ({"visibilities": ""}, "at least one visibility"),
        ({"visibilities": "full,speed:2,speed:02"}, "'speed:2' is named twice"),
        ({"visibilities": "deep"}, "unknown visibility 'deep'"),
        ({"visibilities": "speed:2:boundary=3"}, "must not fix a boundary"),
        ({"pool_labels": True}, "pool_labels needs ray_address"),
        ({"prefill_workers": 3, "autoscale_prefill": "1-2"}, "prefill_workers 3 lies above autoscale_prefill 1-2"),
        ({"visibilities": ["full", 3]}, "list of texts"),
        ({"keep_workers": True}, "keep_workers needs ray_address"),
        ({"hang_timeout_s": float("nan")}, "hang_timeout_s"),
        ({"metrics_port": 65536}, "0…65535"),
        ({"metrics_port": 65534}, "reach 65537"),
        ({"metrics_port": 50048}, "50048…50051"),
        ({"kv_memory": "9" * 400}, "more than any machine has"),
        ({"transfer": {"heartbeat_s": 61.0}}, "heartbeat_s must be at most 60"),
        ({"transfer": {"backend": "nccl"}}, "set transfer_backend"),
        ({"transfer": {"backend": "gloo"}}, "set transfer_backend"),
        ({"transfer": {"host": "10.0.0.1"}}, "set worker_host"),
        ({"worker_port": 50052}, "set worker_host to node"),
        ({**OWN_NODES, "worker_port": 9400}, "are both 9400"),
        ({**OWN_NODES, "worker_port": 70000}, "worker_port must lie in 0…65535"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words.replace("(", r"\(")):
        ServeConfig.from_mapping(values)


def test_workers_on_nodes_of_their_own_share_their_ports() -> None:
    config = ServeConfig.from_mapping({**OWN_NODES, "worker_port": 50052})
    assert (config.worker(Pool.PREFILL).host, config.worker(Pool.PREFILL).port) == ("node", 50052)
    assert config.metrics_address("decode-7") == "node:9400" and not config.metrics_addresses

    class Actor(HostedWorker):
        def node_host(self) -> str:
            return "127.0.0.9"

    told = Actor(json.dumps(config.worker(Pool.DECODE).to_dict()))._config
    assert (told.host, told.transfer.host, told.port) == ("127.0.0.9", "127.0.0.9", 50052)
    numbered = replace(config, worker_metrics_port=0, metrics_port=9000)
    assert list(numbered.metrics_addresses.values()) == ["10.0.0.5:9000", "10.0.0.5:9001", "node:9002", "node:9003"]


def test_a_node_of_our_own_needs_a_head() -> None:
    with pytest.raises(Unavailable, match=r"no Ray head at 127\.0\.0\.1:9 after 0 s \(Connection refused\)"):
        OwnNode.join("127.0.0.1:9", "127.0.0.1", wait_s=0.0)


def test_colocated_has_one_pool() -> None:
    config = ServeConfig.from_mapping({"colocated": True, "decode_workers": 2, "metrics_port": 9000})
    assert (config.prefill_workers, config.pools) == (0, (Pool.DECODE,)) and config.worker(Pool.DECODE).colocated
    assert list(config.metrics_addresses) == ["router", "controller", "decode-0", "decode-1"]
    assert ServeConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert not ServeConfig().worker(Pool.DECODE).colocated


def test_cpus_of_a_pool() -> None:
    config = ServeConfig(prefill_cpus="0-2, 5,1", decode_cpus="7")
    assert config.worker(Pool.PREFILL).cpus == (0, 1, 2, 5) and config.worker(Pool.DECODE).cpus == (7,)
    worker = config.worker(Pool.PREFILL)
    assert type(worker).from_dict(json.loads(json.dumps(worker.to_dict()))) == worker


def test_unreadable_yaml_is_refused(tmp_path: Path) -> None:
    for text, words in (("a: [", "is not YAML"), ("- a", "one mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(InvalidConfig, match=words):
            read_yaml(tmp_path / "bad.yaml")
    with pytest.raises(InvalidConfig, match="cannot read"):
        read_yaml(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("1KiB", 1024), ("1.5m", 3 << 19), ("2 GB", 2 << 30), ("512MiB", 512 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_pool_that_holds_less_than_the_context_is_told(tmp_path: Path) -> None:
    model = str(write_random_model(tmp_path, max_context=1024))
    small = ServeConfig(model=model, dtype="float32", kv_memory=1 << 19)
    shape = open_model(model).config.shape
    num_tokens = small.worker(Pool.DECODE).pool_tokens(shape)
    assert 0 < num_tokens < 1024 and num_tokens * shape.kv_elements * shape.num_layers * 4 <= 1 << 19
    words = context_note(small, open_model(model))
    assert f"holds {num_tokens} tokens at full depth, and one request may have 1024" in words
    assert f"--max-context-tokens {num_tokens}" in words
    assert not context_note(replace(small, max_context_tokens=num_tokens), open_model(model))
    assert not context_note(replace(small, kv_memory=1 << 30), open_model(model))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"--listen 127.0.0.1:{port}: Address already in use"):
            check_port("127.0.0.1", port, "--listen")
    check_port("127.0.0.1", free_port("127.0.0.1"), "--listen")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--visibilities", "full,speed:5"], "prefill depth 5 exceeds the model's 4 layers"),
        (["--decode-cpus", "9999"], "CPU 9999 is not among those"),
        (["--threads-per-worker", "999"], "--threads-per-worker 999 exceeds the"),
        (["--threads-per-worker", "5000"], "must be at most 1024, not 5000"),
        (["--token-budget", "100000000"], "must be at most 1048576, not 100000000"),
        (["--kv-memory", "4KiB"], "too little KV memory"),
        (["--kv-memory", "1000TiB"], "the KV pools of 2 workers may take"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--listen", "0.0.0.0:0"], "add --allow-wildcard"),
        (["--listen", "256.0.0.1:1"], "--listen 256.0.0.1:1"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: Connection refused"),
        (["--prefill-workers", "-1"], "--prefill-workers must be at least 1"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
        (["--worker-host", "192.0.2.1"], "--worker-host 192.0.2.1: Cannot assign requested address; name an address"),
        (["--worker-host", "0.0.0.0"], "must name one IPv4 interface"),
        (["--worker-host", "node"], "it needs --ray-address and --controller-listen"),
        (["--max-context-tokens", "513"], "--max-context-tokens 513 exceeds the model's own 512"),
        (["--visibilities", "speed:2", "--shadow-rate", "0.1"], "which --visibilities speed:2 do not allow; add full"),
        (["--visibilities", "full,speed:4", "--shadow-rate", "0.1"], "and --visibilities full name none"),
        (
            ["--shadow-rate", "0.1", "--shadow-min-samples", "300"],
            "300 can never be reached in a --shadow-window",
        ),
        (["--visibilities", "full,speed:2", "--max-boundary-tokens", "1"], "raise --max-boundary-tokens to"),
    ],
)
def test_bad_input_ends_serve_before_anything_is_started(model: Path, flags: list[str], words: str) -> None:
    arguments = ["--listen", "127.0.0.1:0", *([] if "--model" in flags else ["--model", str(model)]), *flags]
    result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and words in result.stderr


def test_a_truncated_weight_file_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(InvalidConfig, match="safetensors"):
        check(ServeConfig(model=str(tmp_path), listen="127.0.0.1:0"))


def test_a_missing_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InvalidConfig, match=r"no tokenizer\.json"):
        check(ServeConfig(model=str(tmp_path), listen="127.0.0.1:0"))


def test_entries_that_hold_no_token_are_refused(model: Path) -> None:
    config = ServeConfig.from_mapping({"model": str(model), "listen": "127.0.0.1:0", "transfer": {"max_entry_bytes": 255}})
    with pytest.raises(InvalidConfig, match="at least 256"):
        check(config)


def test_an_unsupported_architecture_is_named(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidConfig, match=r"[Mm]amba"):
        check(ServeConfig(model=str(tmp_path), listen="127.0.0.1:0"))


def test_the_page_on_operations_names_every_flag_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = {row.split("|")[1]: row.split("|")[2].strip() for row in page.splitlines() if row.startswith("| `--")}
    flags = {"--" + name.replace("_", "-") for name in HELP}
    assert flags == {part.strip(" `") for cell in rows for part in cell.split(",")}
    for cell, shown in rows.items():
        for flag, value in zip(cell.split(","), shown.split(","), strict=True):
            default = getattr(ServeConfig(), flag.strip(" `").removeprefix("--").replace("-", "_"))
            value = value.strip(" `")
            if isinstance(default, bool):
                expected = "on" if default else "off"
            elif isinstance(default, tuple):
                expected = ",".join(default)
            elif flag.strip(" `") == "--kv-memory":
                expected = f"{default >> 20}MiB"
            else:
                expected = f"{default:g}" if isinstance(default, float) else str(default) or "–"
            assert value == expected, flag


def test_the_router_is_told_of_its_body_and_of_images() -> None:
    given = {"http_listen": "127.0.0.1:0", "http_max_body_mb": 2.5, "max_images": 3, "max_image_mb": 1.5, "max_images_mb": 4}
    for values, num_bytes in ((given, 2_500_000), ({"http_listen": "127.0.0.1:0"}, 8_000_000)):
        config = ServeConfig.from_mapping(values)
        (place,) = router_places(config)
        flags = router.make_context("router", router_arguments(config, place, "127.0.0.1:1")[2:]).params
        read = read_settings(**{name: value for name, value in flags.items() if name not in PROCESS_FLAGS})
        assert (read.http_max_body_bytes, read.images) == (num_bytes, config.images)


def test_nccl_without_gpus_and_one_port_for_two_doors_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = str(write_random_model(tmp_path / "tiny"))
    with pytest.raises(InvalidConfig, match=r"nccl needs a GPU for each of 5000 workers .* --ray-address"):
        check(ServeConfig(model=model, listen="127.0.0.1:0", transfer_backend="nccl", prefill_workers=4999))
    with pytest.raises(InvalidConfig, match=r"--http-listen .* port of its own"):
        check(ServeConfig(model=model, listen="127.0.0.1:50997", http_listen="127.0.0.1:50997"))


def test_workers_may_bind_to_the_node_they_are_placed_on() -> None:
    values = {"worker_host": "node", "ray_address": "10.0.0.1:6379", "controller_listen": "10.0.0.5:50050", "metrics_port": 9100}
    config = ServeConfig.from_mapping(values)
    assert config.own_host == "10.0.0.5"
    assert config.metrics_addresses["controller"] == "10.0.0.5:9101" and config.metrics_address("decode-0") == "node:9103"
    placed = config.worker(Pool.DECODE).placed_at("10.0.0.7")
    assert (placed.host, placed.transfer.host) == ("10.0.0.7", "10.0.0.7")
    assert config.worker(Pool.DECODE).host == "node" and placed.placed_at("10.0.0.9") is placed


def test_no_message_of_kv_waits_for_a_second_prefill_step() -> None:
    for budget, given, entry_tokens in ((512, {}, 512), (8192, {}, 2048), (512, {"max_entry_tokens": 100}, 100)):
        config = ServeConfig.from_mapping({"token_budget": budget, "transfer": given})
        assert {config.worker(pool).transfer.max_entry_tokens for pool in Pool} == {entry_tokens}


@pytest.mark.parametrize(
    ("ray_address", "platform", "gpus", "asked", "backend"),
    [
        ("", "linux", (), "auto", "shared-memory"),
        ("10.0.0.1:6379", "linux", (), "auto", "gloo"),
        ("", "darwin", (), "auto", "gloo"),
        ("", "linux", ("nvidia0",), "auto", "gloo"),
        ("", "linux", (), "gloo", "gloo"),
        ("10.0.0.1:6379", "linux", (), "shared-memory", "shared-memory"),
    ],
)
def test_kv_crosses_in_shared_memory_only_where_all_workers_share_it(
    monkeypatch: pytest.MonkeyPatch, ray_address: str, platform: str, gpus: tuple[str, ...], asked: str, backend: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(gpus))
    config = ServeConfig(ray_address=ray_address, transfer_backend=asked)
    assert config.kv_backend == config.worker(Pool.PREFILL, "prefill-0", 1).transfer.backend == backend
