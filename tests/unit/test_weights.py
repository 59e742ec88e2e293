"""Weights as tensors: equal to transformers' and to the gguf package's, and only the layers asked for are read."""

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shoal.engine.weights import HeldLayers, LayerWeights, LoadReport, ModelWeights, load_weights
from shoal.engine.weights.read import open_reader
from shoal.errors import InvalidConfig
from shoal.model_files import FileFormat, ModelFiles, Part, TensorInfo, open_model, write_random_model
from shoal.model_files.gguf_file import _ENCODINGS
from shoal.model_files.tensors import required_parts, tensor_name
from shoal.types import DType

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


def load_all(model: ModelFiles, dtype: DType = DType.FLOAT32) -> tuple[ModelWeights, LoadReport]:
    return load_weights(model, HeldLayers.everything(model.config.shape.num_layers), dtype=dtype)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def assert_layer_equals(layer: LayerWeights, state: dict[str, torch.Tensor], prefix: str) -> None:
    q, k, v = (state[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(layer.qkv_weight, torch.cat([q, k, v]))
    assert torch.equal(layer.output_weight, state[prefix + "self_attn.o_proj.weight"])
    assert torch.equal(layer.gate_up_weight, torch.cat([state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    assert torch.equal(layer.down_weight, state[prefix + "mlp.down_proj.weight"])
    assert torch.equal(layer.input_norm, state[prefix + "input_layernorm.weight"])
    assert torch.equal(layer.post_norm, state[prefix + "post_attention_layernorm.weight"])
    assert torch.equal(layer.kv.kv_weight, torch.cat([k, v]))
    optional = {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    for name, ours in optional.items():
        assert (ours is None) == (prefix + name not in state)
        assert ours is None or torch.equal(ours, state[prefix + name])
    assert (layer.qkv_bias is None) == (prefix + "self_attn.q_proj.bias" not in state)
    if layer.qkv_bias is not None and layer.kv.kv_bias is not None:
        biases = [state[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]
        assert torch.equal(layer.qkv_bias, torch.cat(biases)) and torch.equal(layer.kv.kv_bias, torch.cat(biases[1:]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    write_random_model(tmp_path, architecture=architecture, tied_embeddings=tied, num_shards=1 + tied, num_layers=3)
    weights, report = load_all(open_model(str(tmp_path)))
    state = reference(tmp_path)
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    assert torch.equal(weights.head, state["lm_head.weight"])
    assert (weights.head is weights.embedding) is tied
    assert list(weights.layers) == [0, 1, 2] and not weights.kv_only
    for index, layer in weights.layers.items():
        assert_layer_equals(layer, state, f"model.layers.{index}.")
    assert (weights.layers[0].qkv_bias is not None) == (architecture == "qwen2")
    assert (weights.layers[0].k_norm is not None) == (architecture == "qwen3")
    names = [name for name in state if not (tied and name == "lm_head.weight")]
    assert report.tensors_read == len(names)
    assert report.bytes_read == report.resident_bytes == sum(state[name].nbytes for name in names)


@pytest.mark.parametrize("stored", list(DType))
@pytest.mark.parametrize("held", list(DType))
def test_dtypes_are_converted_as_torch_does(tmp_path: Path, stored: DType, held: DType) -> None:
    dtypes = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
    write_random_model(tmp_path, dtype=stored, num_layers=1)
    weights, report = load_all(open_model(str(tmp_path)), held)
    state = reference(tmp_path, dtypes[held])
    assert weights.layers[0].qkv_weight.dtype == dtypes[held]
    assert_layer_equals(weights.layers[0], state, "model.layers.0.")
    assert report.bytes_read * held.num_bytes == report.resident_bytes * stored.num_bytes


def test_kv_is_a_view_of_the_fused_rows(tmp_path: Path) -> None:
    weights, _ = load_all(open_model(str(write_random_model(tmp_path, architecture="qwen2"))))
    layer = weights.layers[1]
    assert layer.qkv_bias is not None and layer.kv.kv_bias is not None
    assert layer.kv.kv_weight.untyped_storage().data_ptr() == layer.qkv_weight.untyped_storage().data_ptr()
    assert layer.kv.kv_bias.untyped_storage().data_ptr() == layer.qkv_bias.untyped_storage().data_ptr()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kv_only_layers_equal_the_full_layers_projections(tmp_path: Path, architecture: str) -> None:
    model = open_model(str(write_random_model(tmp_path, architecture=architecture)))
    everything, _ = load_all(model)
    part, report = load_weights(model, HeldLayers(range(2), range(2, 4), embedding=True, head=False), dtype=DType.FLOAT32)
    assert list(part.layers) == [0, 1] and list(part.kv_only) == [2, 3]
    assert part.head is None and part.final_norm is None and part.embedding is not None
    for index, ours in part.kv_only.items():
        theirs = everything.layers[index].kv
        for name in ("input_norm", "kv_weight", "kv_bias", "k_norm"):
            mine, full = getattr(ours, name), getattr(theirs, name)
            assert (mine is None) == (full is None) and (mine is None or torch.equal(mine, full))
    assert report.layers_opened == (0, 1, 2, 3)


def test_other_layers_files_are_not_even_opened(tmp_path: Path) -> None:
    """With the shards of the upper layers gone, the lower layers still load."""
    folder = write_random_model(tmp_path, num_layers=8, num_shards=8)
    model = open_model(str(folder))
    needed = {model.tensor(Part.EMBEDDING).path}
    needed |= {info.path for name, info in model.tensors.items() if name.startswith(("model.layers.0.", "model.layers.1."))}
    gone = [path for path in folder.glob("*.safetensors") if path not in needed]
    assert len(gone) >= 5
    for path in gone:
        path.unlink()
    held = HeldLayers(range(2), range(2, 2), embedding=True, head=False)
    _, report = load_weights(model, held, dtype=DType.FLOAT32)
    infos = [model.tensor(Part.EMBEDDING)]
    infos += [info for name, info in model.tensors.items() if name.startswith(("model.layers.0.", "model.layers.1."))]
    assert report.layers_opened == (0, 1)
    assert (report.bytes_read, report.tensors_read) == (sum(info.num_bytes for info in infos), len(infos))
    with pytest.raises(InvalidConfig, match="cannot read"):
        load_all(model)


def read_bytes_of_this_process() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_loading_k_layers_of_the_default_model_reads_only_those() -> None:
    model = open_model()
    held = HeldLayers(range(2), range(2, 4), embedding=False, head=False)
    before = read_bytes_of_this_process()
    seen: list[tuple[int, int]] = []
    weights, report = load_weights(model, held, dtype=DType.BFLOAT16, progress=lambda done, total: seen.append((done, total)))
    kernel = read_bytes_of_this_process() - before
    kv_names = ("attn_norm.weight", "attn_k.weight", "attn_v.weight")
    table = sum(info.num_bytes for name, info in model.tensors.items() if name.startswith(("blk.0.", "blk.1.")))
    table += sum(model.tensors[f"blk.{layer}.{name}"].num_bytes for layer in (2, 3) for name in kv_names)
    assert report.bytes_read == table
    assert table <= kernel < table + 100_000  # what the kernel counted, with Python's own small reads beside it
    assert report.layers_opened == (0, 1, 2, 3) and list(weights.layers) == [0, 1] and list(weights.kv_only) == [2, 3]
    assert weights.embedding is None and weights.head is None
    assert seen[-1] == (table, table) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_loading_needs_little_memory_beside_the_tensors_themselves() -> None:
    """What numpy and Python allocate while loading; torch's own tensors are not in this count."""
    model = open_model()
    tracemalloc.start()
    try:
        load_weights(model, HeldLayers(range(1), range(0), embedding=True, head=False), dtype=DType.FLOAT32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20  # the embedding alone is 113 MB


@pytest.mark.parametrize("encoding", [name for name, _, _ in _ENCODINGS.values()])
def test_every_encoding_is_decoded_as_the_gguf_package_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr("shoal.engine.weights.read._PIECE_BYTES", 16_000)  # several pieces, the last one short
    kind = gguf.GGMLQuantizationType[encoding]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert (encoding, block, block_bytes) == _ENCODINGS[kind.value]
    rows, columns = 48, 512
    if encoding in ("F32", "F16", "BF16"):
        data = gguf.quantize(np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32), kind)
    else:
        data = np.random.default_rng(0).integers(0, 100, (rows, columns // block * block_bytes), dtype=np.uint8)
    raw = data.view(np.uint8).tobytes()
    (tmp_path / "tensor").write_bytes(b"before" + raw + b"after")
    info = TensorInfo("t", (rows, columns), encoding, tmp_path / "tensor", 6, len(raw))
    expected = torch.from_numpy(np.array(gguf.dequantize(data, kind), dtype=np.float32))
    plain, paired = torch.empty(rows, columns), torch.empty(rows, columns)
    with open_reader(FileFormat.GGUF) as reader:
        reader.read_into(info, plain)
        reader.read_into(info, paired, pairs_of=8)
        assert (reader.num_bytes_read, reader.num_tensors_read) == (2 * len(raw), 2)
    torch.testing.assert_close(plain, expected, rtol=0, atol=0, equal_nan=True)
    order = [head * 8 + 2 * (row % 4) + row // 4 for head in range(rows // 8) for row in range(8)]
    torch.testing.assert_close(paired, expected[order], rtol=0, atol=0, equal_nan=True)


def test_gguf_tensors_equal_the_gguf_packages_own() -> None:
    model = open_model()
    weights, _ = load_weights(model, HeldLayers(range(3, 4), range(0), embedding=True, head=True), dtype=DType.FLOAT32)

    def dequantised(part: Part, layer: int | None = None) -> torch.Tensor:
        info = model.tensor(part, layer)
        data = np.fromfile(info.path, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        rows = data.reshape(info.shape[0], -1) if len(info.shape) == 2 else data
        return torch.from_numpy(np.array(gguf.dequantize(rows, gguf.GGMLQuantizationType[info.encoding])))

    layer, shape = weights.layers[3], model.config.shape
    assert weights.embedding is weights.head
    assert torch.equal(weights.embedding, dequantised(Part.EMBEDDING))
    assert torch.equal(layer.down_weight, dequantised(Part.DOWN, 3))
    assert torch.equal(layer.gate_up_weight, torch.cat([dequantised(Part.GATE, 3), dequantised(Part.UP, 3)]))
    q, v = layer.qkv_weight[: shape.num_heads * 64], layer.kv.kv_weight[shape.num_kv_heads * 64 :]
    assert torch.equal(v, dequantised(Part.V, 3))
    stored = dequantised(Part.Q, 3)
    for head in range(shape.num_heads):
        for row in range(64):
            ours = q[head * 64 + row]
            assert torch.equal(ours, stored[head * 64 + 2 * (row % 32) + row // 32])  # pairs (2i, 2i+1) → (i, i + 32)


def write_gguf(path: Path, source: ModelFiles, architecture: str, *, with_factors: bool = False) -> None:
    """The same weights as a GGUF file, the way llama.cpp's converter writes them."""
    config, shape = source.config, source.config.shape
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(shape.num_layers)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_context_length(shape.max_context)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if with_factors:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope.frequency_factors(shape.head_dim), dtype=np.float32))
    for part, layer in required_parts(config):
        info = source.tensor(part, layer)
        array = np.fromfile(info.path, dtype=np.float32, count=info.num_bytes // 4, offset=info.offset).reshape(info.shape)
        if architecture == "llama" and part in (Part.Q, Part.K):
            heads = shape.num_heads if part is Part.Q else shape.num_kv_heads
            array = array.reshape(heads, 2, shape.head_dim // 2, -1).swapaxes(1, 2).reshape(info.shape)
        writer.add_tensor(tensor_name(FileFormat.GGUF, part, layer), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_of_each_architecture_equals_the_folder(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = write_random_model(tmp_path / "hf", architecture=architecture, tied_embeddings=tied, num_layers=2)
    source = open_model(str(folder))
    write_gguf(tmp_path / "same.gguf", source, architecture)
    model = open_model(str(tmp_path / "same.gguf"))
    assert model.config.shape == source.config.shape
    assert model.config.tied_embeddings is tied and model.config.rope == source.config.rope
    ours, _ = load_all(model)
    state = reference(folder)
    for index, layer in ours.layers.items():
        assert_layer_equals(layer, state, f"model.layers.{index}.")
    assert torch.equal(ours.head, state["lm_head.weight"])


def test_a_ggufs_rotary_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    source = open_model(str(write_random_model(tmp_path / "hf", llama3_rope=True, num_layers=1, max_context=8192)))
    write_gguf(tmp_path / "same.gguf", source, "llama", with_factors=True)
    rope = open_model(str(tmp_path / "same.gguf")).config.rope
    assert rope.frequency_factors(16) == pytest.approx(source.config.rope.frequency_factors(16), rel=1e-6)
    assert len(set(rope.factors)) > 2


def test_a_file_cut_after_opening_is_refused(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    model = open_model(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidConfig, match=r"cut short within .* since it was opened"):
        load_all(model)


@pytest.mark.parametrize(
    "held", [(range(5), range(0)), (range(2), range(1, 4)), (range(0, 4, 2), range(0)), (range(-1, 2), range(0))]
)
def test_layers_that_cannot_be_held_are_refused(tmp_path: Path, held: tuple[range, range]) -> None:
    model = open_model(str(write_random_model(tmp_path)))
    with pytest.raises(InvalidConfig, match=r"cannot hold|held in full already"):
        load_weights(model, HeldLayers(*held, embedding=False, head=False), dtype=DType.FLOAT32)
