"""Are the compiled kernels right on this machine? Compares them with torch on a small layer, once per type and process."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import torch

from shoal.engine.kernels import Kernels, KernelsUnavailable
from shoal.engine.kv_pool import KvPool
from shoal.engine.layer_backend import StageRows, StageWork
from shoal.engine.native_layers import NativeLayers
from shoal.engine.query_runs import QueryRun, SlotGeometry
from shoal.engine.rope import Frequencies
from shoal.engine.score_rule import ScoreRule
from shoal.engine.stages import RowGroup, Stage
from shoal.engine.torch_attention import TorchAttention
from shoal.engine.torch_layers import TorchLayers
from shoal.engine.weights import LayerWeights
from shoal.model_files import Activation, DecoderConfig, RopeConfig
from shoal.types import DType, ModelShape

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
_SHAPE = ModelShape(
    num_layers=1,
    hidden_size=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=80,
    vocab_size=50,
    max_context=256,
)
_CONFIG = DecoderConfig(
    shape=_SHAPE,
    architecture="qwen3",
    rms_eps=1e-5,
    rope=RopeConfig(theta=100.0),
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(0,),
)
_CONFIGS = (
    _CONFIG,
    replace(  # what Gemma adds
        _CONFIG,
        shape=replace(_SHAPE, windows=(40,)),
        activation=Activation.GELU_TANH,
        branch_norms=True,
        score_scale=0.3,
        local_rope=RopeConfig(theta=30.0),
        attention_softcap=2.0,
    ),
)
_NUM_ROWS, _BLOCK = 75, 16


@cache
def check_native(library: Kernels, dtype: torch.dtype) -> None:
    """Raises KernelsUnavailable when a layer or the scores differ from torch's by more than rounding."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return values.to(dtype)

    width = _SHAPE.num_heads * _SHAPE.head_dim
    kv_width = 2 * _SHAPE.num_kv_heads * _SHAPE.head_dim
    weights = LayerWeights(
        input_norm=random(64),
        qkv_weight=random(width + kv_width, 64),
        qkv_bias=random(width + kv_width),
        q_norm=random(32) + 1,
        k_norm=random(32) + 1,
        output_weight=random(64, width),
        post_norm=random(64) + 1,
        gate_up_weight=random(160, 64),
        down_weight=random(64, 80),
        attention_norm=random(64) + 1,
        mlp_norm=random(64) + 1,
    )
    x, head = random(_NUM_ROWS, 64) * 8, random(50, 64)
    for config, rows, is_causal in product(_CONFIGS, (1, _NUM_ROWS), (True, False)):
        own = weights if config.branch_norms else replace(weights, attention_norm=None, mlp_norm=None)
        plain = _layer(TorchLayers(config, dtype, TorchAttention(ScoreRule.of(config))), own, x[:rows], head, is_causal)
        native = _layer(NativeLayers(config, dtype), own, x[:rows], head, is_causal)
        worst = (plain - native).abs().max().item()
        if not worst <= _TOLERANCE[dtype]:
            raise KernelsUnavailable(f"the compiled kernels in {library.path} differ from torch by {worst:.2g} in {dtype}")


def _layer(
    layers: TorchLayers | NativeLayers, weights: LayerWeights, x: torch.Tensor, head: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """One layer and the head over one prompt: scores [n, vocab]."""
    rows = len(x)
    pool = KvPool(layers.config.shape, 6, _BLOCK, DType.BFLOAT16 if x.dtype is torch.bfloat16 else DType.FLOAT32)
    slots = torch.arange(rows)
    group = RowGroup(None, (slots // _BLOCK + 1).view(1, -1), slots % _BLOCK)
    run = QueryRun(0, rows, 0, np.arange(1, 6, dtype=np.int32).reshape(1, -1), SlotGeometry(), is_causal)
    turns = Frequencies.of(layers.config).rotations(slots, layers.rotation_dtype)
    layers.hold({0: weights}, {})
    stage = layers.run(StageWork(Stage(range(1), group, None, (run,)), StageRows(group, x.clone(), turns), None, pool))
    assert list(stage.layers(lambda layer: True)) == [0] and stage.x is not None
    return layers.score(stage.x, weights.post_norm, head)
