"""Loads a GGUF file of the Gemma 3 architecture into transformers, in float32, by the gguf package alone."""

from pathlib import Path

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.oracle.gguf_llama import NAMES

_NAMES = NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def load_gguf_gemma3(path: Path) -> Gemma3ForCausalLM:
    """The whole model, eager attention; layer types and the two rotary bases are transformers' own defaults."""
    reader = gguf.GGUFReader(path)
    meta = {name.removeprefix("gemma3."): field.contents() for name, field in reader.fields.items() if name.startswith("gemma3.")}
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=meta["attention.head_count"],
        num_key_value_heads=meta["attention.head_count_kv"],
        head_dim=meta["attention.key_length"],
        query_pre_attn_scalar=meta["attention.key_length"],
        max_position_embeddings=meta["context_length"],
        sliding_window=meta["attention.sliding_window"],
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        attn_implementation="eager",
    )
    state = {"model.embed_tokens.weight": weights["token_embd.weight"], "lm_head.weight": weights["token_embd.weight"]}
    state["model.norm.weight"] = weights["output_norm.weight"] - 1  # files of this format hold the sum
    for name, weight in weights.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            state[f"model.layers.{layer}.{_NAMES[part]}.weight"] = weight - 1 if part.endswith("norm") else weight
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.eval()
