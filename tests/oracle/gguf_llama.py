"""Loads a GGUF file of the Llama architecture into transformers, in float32, by the gguf package alone."""

from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf_llama(path: Path) -> LlamaForCausalLM:
    """The whole model, eager attention."""
    reader = gguf.GGUFReader(path)
    meta = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = meta["attention.head_count"], meta["attention.head_count_kv"]
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    state = {"model.embed_tokens.weight": weights["token_embd.weight"], "model.norm.weight": weights["output_norm.weight"]}
    state["lm_head.weight"] = weights.get("output.weight", weights["token_embd.weight"])
    for name, weight in weights.items():
        if not name.startswith("blk."):
            continue
        _, layer, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves of each head
            pairs = weight.view(heads if part == "attn_q" else kv_heads, -1, 2, weight.shape[1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{layer}.{NAMES[part]}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.to(torch.float32)
