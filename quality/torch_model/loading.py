"""Fills a torch decoder with a model's weights, through the engine's own reader. Knows names; computes nothing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.engine.weights import HeldLayers, LayerWeights, load_weights
from shoal.errors import InternalError
from shoal.model_files import ModelFiles
from shoal.types import DType


def fill(
    model: nn.Module,
    files: ModelFiles,
    dtype: DType,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Give `model` (on the meta device) its weights. Raises InvalidConfig where the files have changed since they were opened."""
    held = HeldLayers.everything(files.config.shape.num_layers)
    weights, _ = load_weights(files, held, dtype=dtype, device=str(device), progress=progress)
    if weights.embedding is None or weights.final_norm is None or weights.head is None:
        raise InternalError("a whole model was asked for and a part came")
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.head
    for index, layer in weights.layers.items():
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in _named(layer, files).items()}
    owned = {name: tensor.detach().clone() for name, tensor in state.items()}
    if files.config.tied_embeddings:
        owned["lm_head.weight"] = owned["model.embed_tokens.weight"]
    model.load_state_dict(owned, strict=True, assign=True)
    if files.config.tied_embeddings:
        head, body = model.get_submodule("lm_head"), model.get_submodule("model.embed_tokens")
        head.weight = body.weight  # one parameter again


def _named(layer: LayerWeights, files: ModelFiles) -> dict[str, Tensor]:
    """Fused rows taken apart, under Hugging Face's names."""
    s = files.config.shape
    rows = [s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.num_kv_heads * s.head_dim]
    named = {"input_layernorm.weight": layer.input_norm}
    if layer.attention_norm is None or layer.mlp_norm is None:
        named["post_attention_layernorm.weight"] = layer.post_norm
    else:  # Gemma: the reader has added its 1 to all norms
        named["post_attention_layernorm.weight"] = layer.attention_norm
        named["pre_feedforward_layernorm.weight"] = layer.post_norm
        named["post_feedforward_layernorm.weight"] = layer.mlp_norm
    for name, part in zip("qkv", torch.split(layer.qkv_weight, rows), strict=True):
        named[f"self_attn.{name}_proj.weight"] = part
    if layer.qkv_bias is not None:
        for name, part in zip("qkv", torch.split(layer.qkv_bias, rows), strict=True):
            named[f"self_attn.{name}_proj.bias"] = part
    if layer.q_norm is not None and layer.k_norm is not None:
        named |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    gate, up = layer.gate_up_weight.chunk(2)
    named |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": layer.down_weight}
    return named | {"self_attn.o_proj.weight": layer.output_weight}
