"""Names, units, a user's entries, and the words of refusals; `shoal transfer-cost` end to end."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli.transfer_cost import transfer_cost
from shoal.errors import InvalidConfig, NotFound
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.profiles import PROFILES, profile_named
from shoal.simulator.units import parse_bandwidth, parse_rate, parse_seconds, parse_tokens

NAMES = Catalogues.shipped()


@pytest.mark.parametrize(
    ("text", "value"),
    [("100gbe", 12.5e9), ("100Gb/s", 12.5e9), ("25Gbps", 3.125e9), ("12.5GB/s", 12.5e9), ("400Gbit/s", 50e9), ("1e9B/s", 1e9)],
)
def test_bandwidths(text: str, value: float) -> None:
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("text", ["100", "100GB", "100gb", "0gbe", "-1Gb/s", "fast", "10ms", "nanGb/s", ""])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_bandwidth(text)


def test_other_units() -> None:
    assert parse_tokens("32k") == 32_768 and parse_tokens("4_096") == 4096 and parse_tokens("1.5k") == 1536
    assert parse_seconds("250ms") == 0.25 and parse_rate("300/min") == 5
    for parse, text in (
        (parse_tokens, "0"),
        (parse_tokens, "0.5"),
        (parse_tokens, "3ms"),
        (parse_rate, "-2"),
        (parse_rate, "0/s"),
    ):
        with pytest.raises(InvalidConfig):
            parse(text)
    for text in ("5", "5GB", "0ms"):
        with pytest.raises(InvalidConfig):
            parse_seconds(text)


def test_every_entry_has_a_source_and_sane_figures() -> None:
    assert len(set(NAMES.models.values())) == 25 and len(set(NAMES.gpus.values())) == 13
    for entry in [*NAMES.models.values(), *NAMES.gpus.values(), *NAMES.links.values(), *PROFILES.values()]:
        assert entry.source and entry.name
    for gpu in NAMES.gpus.values():
        assert 1e13 < gpu.flops < 1e16 and 1e11 < gpu.memory_bytes_per_s < 1e14


def test_names_are_forgiving_and_wrong_ones_are_told_the_nearest() -> None:
    assert NAMES.model("Llama 3.1 8B") is NAMES.model("llama-3.1-8b")
    assert NAMES.gpu("H100").name == "H100-SXM-80GB"
    assert NAMES.link("40Gb/s").bytes_per_s == 5e9
    with pytest.raises(NotFound, match=r"Llama-3\.1-8B"):
        NAMES.model("lama-3.1-8b")
    with pytest.raises(NotFound, match="H100-SXM-80GB"):
        NAMES.gpu("h10")
    with pytest.raises(NotFound, match="IB_HDR"):
        NAMES.link("ib")
    with pytest.raises(NotFound, match="kernels-h100"):
        profile_named("kernel-h100x")
    with pytest.raises(InvalidConfig, match="not a bandwidth"):
        NAMES.link("40parsecs")


def test_a_users_yaml_adds_gpus_links_prices_and_models(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "gpus:\n- {name: MyGPU, bf16_tflops: 100, memory_gb: 24, memory_gb_s: 500, usd_per_hour: 0.2}\n"
        "links:\n- {name: mylink, bandwidth: 40Gb/s, latency: 30us}\n"
        "prices: {h100: 9.5}\n"
        "models:\n- {name: tiny, layers: 4, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 128, vocab: 99, max_ctx: 512}\n"
    )
    mine = NAMES.extended(path)
    assert mine.gpu("mygpu").flops == 1e14 and mine.link("mylink").latency_s == pytest.approx(3e-5)
    assert mine.gpu("h100").usd_per_hour == mine.gpu("h100-sxm-80gb").usd_per_hour == 9.5
    assert mine.model("tiny").shape.num_layers == 4 and mine.model("llama-3.1-8b")
    path.write_text("gpus:\n- {name: Bad, bf16_tflops: -1, memory_gb: 24, memory_gb_s: 500}\n")
    with pytest.raises(InvalidConfig, match="Bad: bf16_tflops"):
        NAMES.extended(path)
    path.write_text("gpu: []\n")
    with pytest.raises(InvalidConfig, match="sections"):
        NAMES.extended(path)


def test_a_hugging_face_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = NAMES.model(str(tmp_path))
    assert model.shape.head_dim == 16 and model.shape.windows == (32, None) * 3
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": None}))
    with pytest.raises(InvalidConfig, match="layers"):
        NAMES.model(str(tmp_path / "config.json"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(transfer_cost, list(arguments))
    return result.exit_code, result.output


def test_transfer_cost_prints_a_table_and_machine_formats() -> None:
    base = ("--model", "llama-3.1-8b", "--link", "100gbe", "--prompt", "32k")
    code, table = run(*base)
    assert code == 0 and "speed:24" in table and "pop:22:late" in table and "3.22 GB" in table
    code, text = run(*base, "--prompt", "2k", "--link", "10gbe", "--visibility", "full,speed:24", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert code == 0 and len(rows) == 8
    assert {int(row["wire_bytes"]) for row in rows if row["prompt_tokens"] == "32768"} == {
        32767 * 32 * 4096,
        32767 * 24 * 4096 + 8192,
    }
    kilo, plain = (run(*base, "--cached", cached, "--format", "csv") for cached in ("8k", "8192"))
    assert kilo == plain and kilo[0] == 0 and kilo[1] != run(*base, "--format", "csv")[1]
    code, text = run(*base, "--format", "json")
    assert code == 0 and json.loads(text)["about"]["gpu"] == "H100-SXM-80GB" and len(json.loads(text)["rows"]) == 7


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--visibility", "speed:40"), "exceeds the model's 32 layers"),
        (("--visibility", "speed:0"), "prefill depth K >= 1"),
        (("--prompt", "0"), "more than zero"),
        (("--prompt", "32GB"), "makes no sense"),
        (("--prompt", "1m"), "exceeds Llama-3.1-8B's context"),
        (("--rate", "-1"), "more than zero"),
        (("--rate", "0"), "more than zero"),
        (("--link", "100"), "not a bandwidth"),
        (("--tp", "3"), "not divisible by TP 3"),
        (("--tp", "0"), "makes no sense"),
        (("--cached", "999999"), "make no sense"),
        (("--set", "gemm=2"), "lie in (0, 1]"),
        (("--set", "speed=2"), "a profile has no"),
        (("--nics", "0"), "makes no sense"),
    ],
)
def test_transfer_cost_refuses_with_words(extra: tuple[str, str], words: str) -> None:
    code, text = run("--model", "llama-3.1-8b", "--link", "100gbe", "--prompt", "4k", *extra)
    assert code == 2 and words in text, text
