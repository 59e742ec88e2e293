"""Every stored golden again, on the real model, across two processes and a wire (gate B)."""

from pathlib import Path

import pytest

from shoal.config.transfer import TransferConfig
from shoal.config.worker import Pool
from shoal.model_files import open_model
from shoal.placement.arithmetic import wire_bytes
from shoal.types import DType
from shoal.visibility import Visibility
from tests.e2e.harness import Ask, generate_all, make_config, processes
from tests.unit.test_goldens_smollm2 import GOLDENS

MODEL = "smollm2-135m"
CASES = [case for case in GOLDENS if len(case.prompt) < 700 or "late" in case.visibility]  # one long prompt is enough here


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_goldens_across_two_processes(tmp_path: Path) -> None:
    """All at once: one batch on each side, prompts cut by the token budget, entries by a wire size of their own."""
    model = open_model(MODEL)
    shape, eos = model.config.shape, model.config.eos_token_ids
    policies = dict.fromkeys(Visibility.parse(case.visibility).resolve(shape.num_layers).policy for case in CASES)
    common = {
        "allowed_visibilities": tuple(policies),
        "num_blocks": 30_000,
        "block_size": 16,
        "token_budget": 384,
        "max_request_s": 500.0,
        "transfer": TransferConfig(max_entry_tokens=100),
    }
    prefill, decode = make_config(Pool.PREFILL, MODEL, **common), make_config(Pool.DECODE, MODEL, **common)
    asks = [
        Ask(case.prompt, case.visibility, max_tokens=len(case.output_ids), stop_token_ids=eos, num_logprobs=5) for case in CASES
    ]
    async with processes(tmp_path, prefill, decode) as (prefill_process, decode_process):
        answers = await generate_all(
            asks, prefill_process.endpoint, decode_process.endpoint, num_layers=shape.num_layers, timeout_s=500
        )
        await prefill_process.endpoint.idle(Pool.PREFILL)
        await decode_process.endpoint.idle(Pool.DECODE)
    assert len(answers) == len(CASES) >= 40
    for case, ask, answer in zip(CASES, asks, answers, strict=True):
        assert tuple(answer.token_ids[: case.num_clear]) == case.output_ids[: case.num_clear], case.name
        for own, expected in zip(answer.top, case.top5[: case.num_clear], strict=False):
            for token, value in expected.items():
                assert abs(own.get(token, min(own.values())) - value) < 1e-3, case.name
        visibility = Visibility.parse(ask.visibility).resolve(shape.num_layers)
        assert answer.finished is not None
        assert answer.finished.received_payload_bytes == wire_bytes(shape, DType.FLOAT32, visibility, len(ask.prompt_ids))
