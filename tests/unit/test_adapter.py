"""Adapters on disk: merged weights are W + scale · B · A, PEFT reads the same, and what does not fit is refused with words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.cli.preflight import check
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool, WorkerConfig
from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.resident import fingerprint_of, open_for
from shoal.engine.weights import load_weights
from shoal.errors import InvalidConfig, Mismatch
from shoal.model_files import DEFAULT_MODEL, Part, open_model
from shoal.model_files.adapter import ADAPTER_CONFIG, ADAPTER_NOTES, ADAPTER_WEIGHTS, adapter_tensor_name
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support
from tests.adapters import write_random_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_random_adapter(tmp_path / "adapter", support.model_files("llama"))


def model_path(variant: str = "llama") -> str:
    return str(support.model_files(variant).path)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("variant", ["llama", "qwen2-bias-mixed-windows", "qwen3-qk-norm-tied"])
@pytest.mark.parametrize("dtype", list(DType))
def test_merged_weights_are_the_sum(variant: str, dtype: DType, tmp_path: Path) -> None:
    files = support.model_files(variant)
    folder = write_random_adapter(tmp_path, files)
    held = HeldLayers.everything(files.config.shape.num_layers)
    plain, _ = load_weights(files, held, dtype=DType.FLOAT32)
    merged, _ = load_weights(open_model(str(files.path), str(folder)), held, dtype=dtype)
    stored, q_rows = load_file(folder / ADAPTER_WEIGHTS), files.config.shape.num_heads * files.config.shape.head_dim

    def added(part: Part, layer: int) -> torch.Tensor:
        return 2.0 * stored[adapter_tensor_name(part, layer, "B")] @ stored[adapter_tensor_name(part, layer, "A")]

    cast = torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float32
    for layer in (1, 3):
        was, now = plain.layers[layer], merged.layers[layer]
        assert torch.allclose(now.qkv_weight[:q_rows].float(), (was.qkv_weight[:q_rows] + added(Part.Q, layer)).to(cast).float())
        assert torch.allclose(now.down_weight.float(), (was.down_weight + added(Part.DOWN, layer)).to(cast).float(), atol=1e-6)
        assert not torch.equal(now.gate_up_weight.float(), was.gate_up_weight)
    assert torch.equal(merged.layers[0].qkv_weight, plain.layers[0].qkv_weight.to(cast))


def test_rows_of_a_gguf_file_are_put_in_order_before_the_sum(tmp_path: Path) -> None:
    files = open_model(DEFAULT_MODEL)
    folder = write_random_adapter(tmp_path, files, "speed:22", first_layer=29)
    held = HeldLayers(range(29, 30), range(30, 30), embedding=False, head=False)
    plain, _ = load_weights(files, held, dtype=DType.FLOAT32)
    merged, _ = load_weights(open_model(DEFAULT_MODEL, str(folder)), held, dtype=DType.FLOAT32)
    stored = load_file(folder / ADAPTER_WEIGHTS)
    for part, rows in ((Part.Q, slice(0, 576)), (Part.K, slice(576, 768)), (Part.V, slice(768, 960))):
        added = 2.0 * stored[adapter_tensor_name(part, 29, "B")] @ stored[adapter_tensor_name(part, 29, "A")]
        assert torch.allclose(merged.layers[29].qkv_weight[rows], plain.layers[29].qkv_weight[rows] + added, atol=1e-6)


@pytest.mark.parametrize("variant", ["llama", "qwen3-qk-norm-tied"])
def test_peft_reads_what_we_write_and_gives_the_same_scores(variant: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; the dev extra brings it")
    files = support.model_files(variant)
    folder = write_random_adapter(tmp_path, files, "full")
    reference = peft.PeftModel.from_pretrained(support.reference(variant), str(folder))
    ids = support.prompt(19)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    reference.unload()
    model = open_model(str(files.path), str(folder))
    decoder, _ = Decoder.load(model, dtype=DType.FLOAT32, held=HeldLayers.everything(files.config.shape.num_layers))
    (result,) = support.engine(decoder).generate([support.greedy(ids, "full", max_tokens=1)])
    for token, logprob in result.logprobs[0].top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)


def test_the_digest_is_of_what_changes_the_model(adapter: Path, tmp_path: Path) -> None:
    files = support.model_files("llama")
    digest = open_model(model_path(), str(adapter)).adapter_digest
    copy = shutil.copytree(adapter, tmp_path / "copy")
    assert open_model(model_path(), str(copy)).adapter_digest == digest
    edit(copy / ADAPTER_CONFIG, lora_alpha=9.0)
    assert open_model(model_path(), str(copy)).adapter_digest != digest
    other = write_random_adapter(tmp_path / "other", files, seed=3)
    assert open_model(model_path(), str(other)).adapter_digest != digest
    assert open_model(model_path()).adapter_digest == ""


def worker(adapter: Path | None, *allowed: str, any_visibility: bool = False) -> WorkerConfig:
    return WorkerConfig(
        "decode-0",
        Pool.DECODE,
        model_path(),
        adapter=str(adapter or ""),
        adapter_any_visibility=any_visibility,
        allowed_visibilities=tuple(Visibility.parse(text) for text in allowed),
    )


def test_workers_with_and_without_it_are_told_apart(adapter: Path) -> None:
    tuned, plain = worker(adapter, "speed:2"), worker(None, "speed:2")
    theirs, ours = (fingerprint_of(open_for(config), config) for config in (tuned, plain))
    assert ours.differences(theirs) == [f"adapter:  != {theirs.adapter}"]
    assert worker(adapter, "speed:2") == WorkerConfig.from_dict(tuned.to_dict())


def test_it_is_served_under_the_visibility_it_was_tuned_for(adapter: Path) -> None:
    open_for(worker(adapter, "speed:2"))
    for allowed in (["speed:3"], ["speed:2", "full"], ["speed:2:anchors=2"], ["pop:2"]):
        with pytest.raises(Mismatch, match=r"was tuned under speed:2, and .* would be served"):
            open_for(worker(adapter, *allowed))
        open_for(worker(adapter, *allowed, any_visibility=True))


def test_serve_refuses_before_it_starts_anything(adapter: Path) -> None:
    with pytest.raises(Mismatch, match=r"serve --visibilities speed:2 alone, or add --adapter-any-visibility"):
        check(ServeConfig(model=model_path(), adapter=str(adapter), visibilities=("full",), listen="127.0.0.1:0"))


def test_an_adapter_for_another_model_is_refused(adapter: Path) -> None:
    with pytest.raises(Mismatch, match=r"was tuned for model revision \w{16} .*, and this model is \w{16}"):
        open_model(model_path("llama3-rope"), str(adapter))
    edit(adapter / ADAPTER_NOTES, base_revision="")
    with pytest.raises(Mismatch, match="it is for another model"):
        open_model(model_path("qwen3-qk-norm-tied"), str(adapter))
    with pytest.raises(Mismatch, match="beyond the model's 2 layers"):
        open_model(model_path("long"), str(adapter))


def test_one_from_elsewhere_needs_the_operators_word(adapter: Path) -> None:
    (adapter / ADAPTER_NOTES).unlink()
    with pytest.raises(Mismatch, match="does not say which visibility"):
        open_for(worker(adapter, "speed:2"))
    open_for(worker(adapter, "speed:2", any_visibility=True))


def _without_b(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    del tensors[adapter_tensor_name(Part.Q, 1, "B")]
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def _with_more(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, folder / ADAPTER_WEIGHTS)


def _with_a_name_in_full_width(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    name = next(iter(tensors))
    save_file(
        {name.replace("layers.0.", "layers.\uff10.").replace("layers.1.", "layers.01."): tensors[name]}, folder / ADAPTER_WEIGHTS
    )


def test_weights_that_are_no_numbers_are_refused_before_they_serve(adapter: Path) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}, adapter / ADAPTER_WEIGHTS)
    model = open_model(model_path(), str(adapter))
    with pytest.raises(InvalidConfig, match="hold numbers that are not finite"):
        Decoder.load(model, dtype=DType.FLOAT32, held=HeldLayers.everything(model.config.shape.num_layers), backend="torch")


def _cut(folder: Path) -> None:
    path = folder / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: edit(folder / ADAPTER_CONFIG, use_dora=True), "use_dora is True; only plain LoRA is supported"),
        (lambda folder: edit(folder / ADAPTER_CONFIG, peft_type="IA3"), "type 'IA3'; supported: LORA"),
        (lambda folder: edit(folder / ADAPTER_CONFIG, lora_alpha="two"), "lora_alpha is 'two'; it must be a number"),
        (lambda folder: edit(folder / ADAPTER_CONFIG, lora_alpha=10**400), "it must be a number of at most 1e"),
        (lambda folder: edit(folder / ADAPTER_CONFIG, lora_alpha=float("nan")), "lora_alpha is 'nan'"),
        (lambda folder: edit(folder / ADAPTER_CONFIG, use_rslora="false"), "use_rslora is 'false'; it must be true or false"),
        (_with_a_name_in_full_width, "has no place"),
        (lambda folder: edit(folder / ADAPTER_NOTES, visibility="speed:9"), "prefill depth 9 exceeds"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / ADAPTER_CONFIG).unlink(), "cannot read"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "cannot read"),
        (lambda folder: shutil.rmtree(folder), "is not a folder"),
        (_cut, "is cut short"),
        (_without_b, "has lora_A alone"),
        (_with_more, "has no place"),
    ],
)
def test_damaged_ones_are_refused_with_words(damage: Callable[[Path], Any], words: str, adapter: Path) -> None:
    damage(adapter)
    with pytest.raises(InvalidConfig, match=words):
        open_model(model_path(), str(adapter))
