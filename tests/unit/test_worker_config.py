import json

import pytest

from shoal.config.transfer import TransferConfig
from shoal.config.worker import Pool, WorkerConfig
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.prefill_worker.held import deepest_layers
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

SHAPE = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192)


def config(**changes: object) -> WorkerConfig:
    return WorkerConfig(**{"worker_id": "p0", "pool": Pool.PREFILL, "model": "smollm2-135m"} | changes)  # type: ignore[arg-type]


def test_survives_json() -> None:
    written = config(
        dtype=DType.BFLOAT16,
        num_blocks=7,
        allowed_visibilities=(Visibility.parse("speed:22:anchors=4"), Visibility.parse("pop:20:late")),
        transfer=TransferConfig(backend="ordered-gloo", max_entry_tokens=64),
    )
    assert WorkerConfig.from_dict(json.loads(json.dumps(written.to_dict()))) == written


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_budget": 0}, "token_budget"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"port": 70000}, "port"),
        ({"allowed_visibilities": ()}, "allowed_visibilities"),
        ({"worker_id": ""}, "worker_id"),
        ({"max_request_s": 0.0}, "max_request_s"),
    ],
)
def test_unusable_values_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "both"},
        {"dtype": "int3"},
        {"allowed_visibilities": ["deep:3"]},
        {"transfer": {"backend": "carrier-pigeon"}},
        {"transfer": {"port": 1}},
        {"blocks": 3},
    ],
)
def test_unusable_mappings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        WorkerConfig.from_dict(config().to_dict() | changes)


def test_pool_must_hold_one_request() -> None:
    assert config(num_blocks=30 * 8).pool_blocks(SHAPE) == 240
    with pytest.raises(InvalidConfig, match=r"too little KV memory.*num_blocks"):
        config(num_blocks=30 * 8 - 1).pool_blocks(SHAPE)
    with pytest.raises(InvalidConfig, match="kv_memory_bytes"):
        config(kv_memory_bytes=1000).pool_blocks(SHAPE)
    assert config(kv_memory_bytes=240 * 16 * 384 * 4).pool_blocks(SHAPE) == 240


def test_visibility_is_checked_against_the_allow_list() -> None:
    worker = config(allowed_visibilities=(Visibility.parse("speed:22"), Visibility.parse("full")))
    assert worker.accept_visibility("speed:22:boundary=3", 30) == Visibility.parse("speed:22:boundary=3")
    assert worker.accept_visibility("pop:30:boundary=2", 30) == Visibility.parse("full:boundary=2")
    with pytest.raises(InvalidRequest, match="not allowed"):
        worker.accept_visibility("speed:22:anchors=2:boundary=1", 30)
    with pytest.raises(InvalidRequest, match="not resolved"):
        worker.accept_visibility("full", 30)
    with pytest.raises(InvalidRequest, match="limit of 64"):
        worker.accept_visibility("full:boundary=65", 30)
    with pytest.raises(InvalidConfig, match="exceeds"):
        config(allowed_visibilities=(Visibility.parse("speed:31"),)).allowed_policies(30)


@pytest.mark.parametrize(
    ("texts", "full", "kv_only"),
    [
        (["full"], range(29), range(29, 30)),
        (["speed:22"], range(22), range(22, 22)),
        (["speed:22:anchors=0"], range(21), range(21, 22)),
        (["pop:20"], range(20), range(20, 30)),
        (["pop:20:late"], range(20), range(20, 20)),
        (["pop:4", "speed:22"], range(22), range(22, 30)),
        (["pop:20:late", "full"], range(29), range(29, 30)),
    ],
)
def test_prefill_holds_only_what_it_may_run(texts: list[str], full: range, kv_only: range) -> None:
    assert deepest_layers(tuple(Visibility.parse(text) for text in texts), 30) == (full, kv_only)
