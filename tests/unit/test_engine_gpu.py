"""The GPU's kernels, layers and recorded steps against torch's own operations.

Without a GPU Triton's interpreter runs the kernels as written (tests/conftest.py): their arithmetic is checked, not their speed,
and steps are run unrecorded.
"""

import pytest
import torch

from shoal.errors import InvalidConfig
from tests import engine_support as support

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

CAPPED = "gemma2-caps-window"  # scores with a soft cap, which these kernels do not have
CASES = [(variant, "speed:2:anchors=2:boundary=2") for variant in support.VARIANTS if variant != CAPPED]
CASES += [("qwen2-bias-mixed-windows", text) for text in ("full", "speed:3:anchors=0", "pop:2", "pop:2:late:boundary=3")]
LENGTHS = (1, 4, 11)


@pytest.mark.parametrize(("variant", "visibility"), CASES)
def test_equals_torch(variant: str, visibility: str) -> None:
    """Fresh and continued prompts, single rows inside and outside recorded steps; 11 tokens reach beyond the window."""
    requests = [support.greedy(support.prompt(length), visibility, 2) for length in LENGTHS]
    expected, own = (
        support.engine(support.decoder(variant, backend=backend), token_budget=6).generate(requests)
        for backend in ("torch", "triton")
    )
    for result, reference in zip(own, expected, strict=True):
        support.assert_close(result, reference)


def test_a_soft_cap_is_torchs_and_says_so() -> None:
    with pytest.raises(InvalidConfig, match="the Triton kernels have no soft cap"):
        support.decoder(CAPPED, backend="triton")


def test_a_sink_runs_stage_by_stage() -> None:
    requests = [support.greedy(support.prompt(11), "speed:2:sink:boundary=2", 2)]
    expected, own = (
        support.engine(support.decoder("mistral-window", backend=backend)).generate(requests) for backend in ("torch", "triton")
    )
    support.assert_close(own[0], expected[0])


def test_padding_and_strangers_are_never_read() -> None:
    from shoal.engine.gpu import operations as gpu

    generator = torch.Generator().manual_seed(0)
    kv_heads, heads, d, block = 2, 6, 24, 4
    pool = torch.full((9, 2, kv_heads, block, d), float("nan"))
    table = torch.tensor([[3, 0, 0], [1, 2, 0], [4, 5, 6], [0, 0, 0]], dtype=torch.int32)
    lasts, starts = [0, 6, 11, -1], [0, 0, 5, 0]
    for row, last in enumerate(lasts):
        for slot in range(starts[row], last + 1):
            pool[table[row, slot // block], :, :, slot % block] = torch.randn(2, kv_heads, d, generator=generator)
    q = torch.randn(len(lasts), heads, d, generator=generator)
    slots, first = (torch.tensor(values, dtype=torch.int32) for values in (lasts, starts))
    out = gpu.attend_rows(q, pool, gpu.RowKeys(table, slots, first), d**-0.5)
    for row, last in enumerate(lasts[:3]):
        own = torch.stack([pool[table[row, slot // block], :, :, slot % block] for slot in range(starts[row], last + 1)], 2)
        k, v = own.repeat_interleave(heads // kv_heads, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(q[row, :, None], k, v)[:, 0]
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out[3], torch.zeros(heads, d))
