"""Greedy answers of a torch decoder's weights, by the engine that serves. Knows engines; judges no answer."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from shoal.engine.backends import choose_backend
from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest
from shoal.engine.weights import LayerWeights, ModelWeights
from shoal.quality.torch_model import DecoderLayer, TorchDecoder
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility

_BLOCK_TOKENS = 16
_MAX_RUNNING = 8


def engine_decoder(model: TorchDecoder, backend: str = "auto") -> Decoder:
    """The engine's decoder with a copy of a torch decoder's weights, in float32: tuned or with some layers only."""
    layers = {index: _fused(cast(DecoderLayer, layer)) for index, layer in enumerate(model.model.layers)}
    body = model.model
    embedding, norm = body.embed_tokens.weight.detach().float(), body.norm.weight.detach().float()
    head = embedding if model.config.tied_embeddings else model.lm_head.weight.detach().float()
    weights = ModelWeights(model.config, embedding, layers, {}, norm, head, len(layers))
    device = embedding.device
    return Decoder(weights, choose_backend(backend, model.config, DType.FLOAT32, device), device)


def generate(
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    visibility: Visibility,
    max_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[int, ...]]:
    """Greedy answers of at most `max_tokens`, an end token included, in the order of the prompts."""
    shape = decoder.config.shape
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    num_blocks = min(len(prompts), _MAX_RUNNING) * shape.num_layers * (-(-longest // _BLOCK_TOKENS) + 1)
    engine = LocalEngine(decoder, KvPool(shape, num_blocks, _BLOCK_TOKENS, DType.FLOAT32, decoder.device))
    for index, prompt in enumerate(prompts):
        engine.submit(str(index), LocalRequest(prompt, visibility, SamplingParams(max_tokens=max_tokens)))
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    num_done = 0
    while not engine.is_idle:
        for token in engine.step():
            answers[token.key].append(token.token_id)
            if token.finish_reason is not None:
                num_done += 1
                if progress is not None:
                    progress(num_done, len(prompts))
    return [tuple(answers[str(index)]) for index in range(len(prompts))]


@torch.no_grad()
def _fused(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases: list[Tensor] = [part.bias for part in qkv if part.bias is not None]
    norms = (attention.q_norm, attention.k_norm)
    q_norm, k_norm = (None if norm is None else norm.weight.detach().float() for norm in norms)
    behind: dict[str, Tensor] = {}
    before_mlp = layer.post_attention_layernorm
    if layer.pre_feedforward_layernorm is not None and layer.post_feedforward_layernorm is not None:
        before_mlp = layer.pre_feedforward_layernorm
        behind["attention_norm"] = layer.post_attention_layernorm.weight.detach().float()
        behind["mlp_norm"] = layer.post_feedforward_layernorm.weight.detach().float()
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv_weight=torch.cat([part.weight for part in qkv]).float(),
        qkv_bias=torch.cat(biases).float() if biases else None,
        q_norm=q_norm,
        k_norm=k_norm,
        output_weight=attention.o_proj.weight.detach().float(),
        post_norm=before_mlp.weight.detach().float(),
        gate_up_weight=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).float(),
        down_weight=mlp.down_proj.weight.detach().float(),
        **behind,
    )
