"""Are the compiled kernels right on this machine? Compares them with torch on a small layer, once per type and process."""

from functools import cache

import numpy as np
import torch

from shoal.engine.kernels import Kernels, KernelsUnavailable
from shoal.engine.kv_pool import KvPool
from shoal.engine.layer_backend import LayerBackend, StageRows, StageWork
from shoal.engine.native_layers import NativeLayers
from shoal.engine.query_runs import QueryRun, SlotGeometry
from shoal.engine.rope import inverse_frequencies, rotation
from shoal.engine.stages import RowGroup, Stage
from shoal.engine.torch_attention import TorchAttention
from shoal.engine.torch_layers import TorchLayers
from shoal.engine.weights import LayerWeights
from shoal.model_files import DecoderConfig, RopeConfig
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
_NUM_ROWS, _BLOCK = 75, 16


@cache
def check_native(library: Kernels, dtype: torch.dtype) -> None:
    """Raises KernelsUnavailable when a layer or the scores differ from torch's by more than rounding."""
    config = _CONFIG
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
    )
    x, head = random(_NUM_ROWS, 64) * 8, random(50, 64)
    for rows in (1, _NUM_ROWS):
        plain = _layer(TorchLayers(config, dtype, TorchAttention()), weights, x[:rows], head)
        native = _layer(NativeLayers(config, dtype), weights, x[:rows], head)
        worst = (plain - native).abs().max().item()
        if not worst <= _TOLERANCE[dtype]:
            raise KernelsUnavailable(f"the compiled kernels in {library.path} differ from torch by {worst:.2g} in {dtype}")


def _layer(layers: LayerBackend, weights: LayerWeights, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """One layer and the head over one prompt: scores [n, vocab]."""
    rows = len(x)
    pool = KvPool(_SHAPE, 6, _BLOCK, DType.BFLOAT16 if x.dtype is torch.bfloat16 else DType.FLOAT32)
    slots = torch.arange(rows)
    group = RowGroup(None, (slots // _BLOCK + 1).view(1, -1), slots % _BLOCK)
    run = QueryRun(0, rows, 0, np.arange(1, 6, dtype=np.int32).reshape(1, -1), SlotGeometry())
    turn = rotation(slots, inverse_frequencies(_CONFIG.rope, _SHAPE.head_dim), layers.rotation_dtype)
    layers.hold({0: weights}, {})
    stage = layers.run(StageWork(Stage(range(1), group, None, (run,)), StageRows(group, x.clone(), turn), None, pool))
    assert list(stage.layers(lambda: True)) == [0] and stage.x is not None
    return layers.score(stage.x, weights.post_norm, head)
