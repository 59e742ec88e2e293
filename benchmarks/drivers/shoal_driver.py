"""Shoal's engine in one process: a continuous batch of requests under one visibility (engine/local.py)."""

import torch
from lines import Steps, serve

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest
from shoal.model_files import open_model
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility

_BLOCK_SIZE = 16


def load(options: dict):
    torch.set_num_threads(options["threads"])
    model, dtype = open_model(options["model"]), DType(options["dtype"])
    shape = model.config.shape
    decoder, _ = Decoder.load(model, dtype=dtype, held=HeldLayers.everything(shape.num_layers))
    blocks = shape.num_layers * (options["max_tokens"] // _BLOCK_SIZE + 64)
    budget = options["max_context"]
    engine = LocalEngine(decoder, KvPool(shape, blocks, _BLOCK_SIZE, dtype), token_budget=budget)
    visibility = Visibility.parse(options.get("visibility", "full"))

    def generate(prompts: list[list[int]], num_tokens: int) -> Steps:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for index, ids in enumerate(prompts):
            engine.submit(str(index), LocalRequest(tuple(ids), visibility, sampling))
        while not engine.is_idle:
            yield [int(token.key) for token in engine.step()]

    return f"back end {decoder.backend}, torch {torch.__version__}", generate


serve(load)
