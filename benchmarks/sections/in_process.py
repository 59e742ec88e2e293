"""What sections that time the engine alone share: one decoder in this process, and pools sized for their cases."""

from functools import cache

import torch

from benchmarks.bench import Options
from benchmarks.engine_bench import BLOCK_SIZE, EngineBench
from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.model_files import open_model
from shoal.placement.blocks import BlockPool
from shoal.types import DType


@cache
def decoder(name: str, dtype: str) -> Decoder:
    """The whole model, by the best back end there is."""
    model = open_model(name)
    return Decoder.load(model, dtype=DType(dtype), held=HeldLayers.everything(model.config.shape.num_layers))[0]


def engine_bench(options: Options, num_tokens: int) -> EngineBench:
    """A pool for `num_tokens` tokens at full depth."""
    torch.set_num_threads(options.threads)
    shape = open_model(options.model).config.shape
    num_blocks = shape.num_layers * (num_tokens // BLOCK_SIZE + 64)
    return EngineBench(KvPool(shape, num_blocks, BLOCK_SIZE, DType(options.dtype)), BlockPool(num_blocks))
