"""A tuned model through two workers and a wire: the same tokens as whole, and no KV between different adapters."""

from pathlib import Path
from typing import Any

import pytest

from shoal.config.worker import Pool
from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest
from shoal.errors import Mismatch
from shoal.model_files import open_model, write_random_model
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.adapters import write_random_adapter
from tests.e2e.harness import Ask, ends_with, generate, generate_all, in_process, make_config

SPEED = "speed:2"
ASKS = [Ask(tuple((7 * n + index) % 512 for n in range(length)), SPEED, 8) for index, length in enumerate((2, 17, 40, 70))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_adapter(tmp_path_factory.mktemp("adapter"), open_model(str(model)), SPEED)


def whole(model: Path, adapter: str) -> list[list[int]]:
    """One process, one pool."""
    files = open_model(str(model), adapter)
    decoder, _ = Decoder.load(files, dtype=DType.FLOAT32, held=HeldLayers.everything(files.config.shape.num_layers))
    engine = LocalEngine(decoder, KvPool(files.config.shape, 4096, 8, DType.FLOAT32))
    sampling = SamplingParams(8, ignore_eos=True)
    asks = (LocalRequest(ask.prompt_ids, Visibility.parse(SPEED), sampling) for ask in ASKS)
    return [list(result.token_ids) for result in engine.generate(asks)]


async def test_split_equals_whole(model: Path, adapter: Path) -> None:
    settings: dict[str, Any] = {"adapter": str(adapter), "allowed_visibilities": (Visibility.parse(SPEED),)}
    prefill, decode = (make_config(pool, model, **settings) for pool in (Pool.PREFILL, Pool.DECODE))
    async with in_process(prefill, decode) as (_, _, prefill_end, decode_end):
        answers = await generate_all(ASKS, prefill_end, decode_end)
    assert [answer.token_ids for answer in answers] == whole(model, str(adapter))
    assert [answer.token_ids for answer in answers] != whole(model, "")


async def test_workers_of_different_adapters_refuse_each_other(model: Path, adapter: Path) -> None:
    allowed: dict[str, Any] = {"allowed_visibilities": (Visibility.parse(SPEED),)}
    prefill, decode = (
        make_config(Pool.PREFILL, model, **allowed),
        make_config(Pool.DECODE, model, adapter=str(adapter), **allowed),
    )
    async with in_process(prefill, decode) as (_, _, prefill_end, decode_end):
        error = await ends_with(generate(ASKS[2], prefill_end, decode_end))
    assert isinstance(error, Mismatch)
    assert f"adapter:  != {open_model(str(model), str(adapter)).adapter_digest}" in str(error)
