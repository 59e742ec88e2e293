"""Writes a model that Shoal can open as a Hugging Face folder in bfloat16, so that peers run the same weights.

`python -m benchmarks.export_hf smollm2-135m FOLDER`. Knows files and names; runs no model.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal.engine.weights import HeldLayers, load_weights
from shoal.model_files import DecoderConfig, ModelFiles, RopeKind, load_tokenizer, open_model
from shoal.types import DType

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export(name_or_path: str, folder: Path) -> Path:
    """config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the folder."""
    model = open_model(name_or_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(model.config), indent=2))
    save_file(_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(model)
    raw = tokenizer.backend
    raw.save(str(folder / "tokenizer.json"))
    names = {"bos_token": model.config.bos_token_id, "eos_token": model.config.eos_token_ids[0]}
    settings: dict[str, object] = {name: raw.id_to_token(token) for name, token in names.items() if token is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def _config(config: DecoderConfig) -> dict[str, object]:
    if config.rope.kind is not RopeKind.DEFAULT:
        raise SystemExit(f"rope of kind {config.rope.kind} is not exported")
    shape = config.shape
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def _tensors(model: ModelFiles) -> dict[str, torch.Tensor]:
    shape = model.config.shape
    weights, _ = load_weights(model, HeldLayers.everything(shape.num_layers), dtype=DType.BFLOAT16)
    out = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not model.config.tied_embeddings:
        out["lm_head.weight"] = weights.head
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for layer, own in weights.layers.items():
        prefix = f"model.layers.{layer}"
        names = ("q_proj", "k_proj", "v_proj")
        out |= {f"{prefix}.self_attn.{n}.weight": w for n, w in zip(names, torch.split(own.qkv_weight, [q, kv, kv]), strict=True)}
        if own.qkv_bias is not None:
            out |= {f"{prefix}.self_attn.{n}.bias": w for n, w in zip(names, torch.split(own.qkv_bias, [q, kv, kv]), strict=True)}
        out |= {f"{prefix}.self_attn.q_norm.weight": own.q_norm, f"{prefix}.self_attn.k_norm.weight": own.k_norm}
        out[f"{prefix}.self_attn.o_proj.weight"] = own.output_weight
        gate, up = own.gate_up_weight.chunk(2)
        out |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        out[f"{prefix}.mlp.down_proj.weight"] = own.down_weight
        out[f"{prefix}.input_layernorm.weight"] = own.input_norm
        out[f"{prefix}.post_attention_layernorm.weight"] = own.post_norm
    return {name: tensor.contiguous().clone() for name, tensor in out.items() if tensor is not None}


if __name__ == "__main__":
    print(export(sys.argv[1], Path(sys.argv[2])))
