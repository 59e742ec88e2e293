"""The cost model: equal to placement's formulas where both apply, to the papers' arithmetic, and monotone where it must be."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.placement.arithmetic import wire_bytes
from shoal.placement.cost import request_cost
from shoal.placement.seconds import Rates, decode_step_seconds, prefill_seconds
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import PROFILES
from shoal.simulator.request_cost import decode_step_s, request_alone
from shoal.simulator.step_cost import StepCost, StepWork
from shoal.simulator.transfer_cost import Wire, handoff_bytes, handoff_cost
from shoal.types import DType
from shoal.visibility import Visibility

NAMES = Catalogues.shipped()
LLAMA = NAMES.model("llama-3.1-8b")
GEMMA = NAMES.model("gemma-3-12b")
DEEPSEEK = NAMES.model("deepseek-v3")
H100 = NAMES.gpu("h100")
PROFILE = PROFILES["kernels-h100"]
MACHINE = Machine(H100, PROFILE)
WIRE = Wire.of(NAMES.link("100gbe"), MACHINE)


def visibility(text: str, num_layers: int = 32) -> Visibility:
    return Visibility.parse(text).resolve(num_layers)


def rates(machine: Machine) -> Rates:
    profile = machine.profile
    return Rates(
        machine.linear_flops_per_s(LLAMA),
        machine.attention_flops_per_s,
        machine.weight_bytes_per_s,
        machine.kv_bytes_per_s(LLAMA),
        profile.num_half_tokens,
        profile.layer_s,
        profile.step_s,
    )


@pytest.mark.parametrize("text", ["full", "speed:24", "pop:22:late"])
@pytest.mark.parametrize("num_tokens", [2, 100, 5000])
def test_prefill_equals_placements_seconds(text: str, num_tokens: int) -> None:
    shown = visibility(text)
    cost = StepCost(LLAMA, MACHINE, shown)
    leg = request_cost(LLAMA.shape, shown, num_tokens + 1, 1).prefill
    expected = prefill_seconds(LLAMA.shape, DType.BFLOAT16, shown, leg, rates(MACHINE), num_tokens=num_tokens)
    assert cost.prefill_s(num_tokens) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_decode_step_equals_placements_seconds(batch: int) -> None:
    cost = StepCost(LLAMA, MACHINE, visibility("full"))
    expected = decode_step_seconds(LLAMA.shape, DType.BFLOAT16, batch, 12_345, rates(MACHINE))
    assert cost.step_s(StepWork(num_rows=batch, num_kv_layer_tokens=12_345)) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 20_000),
    cached=st.integers(0, 3_000),
    depth=st.integers(1, 48),
    kind=st.sampled_from(["speed:{}", "speed:{}:anchors=4", "pop:{}", "pop:{}:late"]),
    model=st.sampled_from([LLAMA, GEMMA]),
)
def test_bytes_are_placements(num_tokens: int, cached: int, depth: int, kind: str, model: object) -> None:
    spec = LLAMA if model is LLAMA else GEMMA
    shown = visibility(kind.format(min(depth, spec.shape.num_layers)), spec.shape.num_layers)
    expected = wire_bytes(spec.shape, DType.BFLOAT16, shown, num_tokens, cached)
    assert handoff_bytes(spec, shown, num_tokens, num_cached=cached).total == expected


def test_speed_bytes_are_the_designs_formula() -> None:
    num_tokens, depth = 8_192, 24
    expected = (num_tokens - 1) * depth * 2 * 8 * 128 * 2 + 4096 * 2  # T·K·kv·e + α·h·e
    assert handoff_bytes(LLAMA, visibility("speed:24"), num_tokens).total == expected


def test_latent_attention_leaves_one_latent_per_token_and_layer() -> None:
    assert DEEPSEEK.kv_token_bytes == (512 + 64) * 2
    assert handoff_bytes(DEEPSEEK, visibility("full", 61), 1001).total == 1000 * 61 * 1152


def test_parameters_of_known_models() -> None:
    billions = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "deepseek-v3": 671.0, "bloom-176b": 176.2, "qwen3-32b": 32.76}
    for name, expected in billions.items():
        assert NAMES.model(name).num_parameters / 1e9 == pytest.approx(expected, rel=0.005), name


def test_active_experts_of_deepseek_v3() -> None:
    active = sum(DEEPSEEK.active_weights(layer) for layer in range(61)) + 2 * DEEPSEEK.head_weights
    assert active / 1e9 == pytest.approx(37, rel=0.05)  # the paper's "37B activated"
    assert DEEPSEEK.read_weights(10, 1) == pytest.approx(DEEPSEEK.active_weights(10), rel=1e-6)
    assert DEEPSEEK.read_weights(10, 10_000) == pytest.approx(DEEPSEEK.resident_weights(10), rel=1e-6)


def test_tensor_parallelism_replicates_kv_heads_it_cannot_divide() -> None:
    assert Machine(H100, PROFILE, 8).replication(LLAMA) == 1
    assert Machine(H100, PROFILE, 16).replication(LLAMA) == 2
    single = handoff_cost(StepCost(LLAMA, MACHINE, visibility("full")), WIRE, 4096)
    wide_machine = Machine(H100, PROFILE, 16)
    wide = handoff_cost(StepCost(LLAMA, wide_machine, visibility("full")), Wire.of(WIRE.link, wide_machine), 4096)
    assert wide.num_bytes == 2 * single.num_bytes
    assert single.prefill_s / 16 < wide.prefill_s < single.prefill_s


def test_chunks_read_the_weights_again_and_add_up() -> None:
    cost = StepCost(LLAMA, MACHINE, visibility("full"))
    whole, chunked = cost.prefill_s(8192), cost.prefill_s(8192, chunk_tokens=64)
    assert chunked > whole
    ideal = StepCost(LLAMA, Machine(H100, PROFILES["ideal"]), visibility("full"))
    assert ideal.prefill_s(8192, chunk_tokens=2048) == pytest.approx(ideal.prefill_s(8192), rel=1e-9)  # compute-bound: same FLOPs
    assert cost.prefill_s(8192, num_cached=8000) < cost.prefill_s(8192, num_cached=4000) < whole


def test_window_layers_cost_less() -> None:
    global_gemma = replace(GEMMA, shape=replace(GEMMA.shape, windows=()))
    shown = visibility("full", 48)
    assert StepCost(GEMMA, MACHINE, shown).prefill_s(32_768) < StepCost(global_gemma, MACHINE, shown).prefill_s(32_768)
    assert handoff_bytes(GEMMA, shown, 32_768).total < handoff_bytes(global_gemma, shown, 32_768).total / 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    text=st.sampled_from(["full", "speed:24", "speed:8", "pop:22", "pop:22:late"]),
    num_tokens=st.integers(2, 50_000),
    rate=st.floats(1e8, 1e12),
    faster=st.floats(1.0, 100.0),
    chunk=st.sampled_from([None, 512, 4096]),
)
def test_more_bandwidth_never_hurts(text: str, num_tokens: int, rate: float, faster: float, chunk: int | None) -> None:
    cost = StepCost(LLAMA, MACHINE, visibility(text))
    slow = Wire(replace(WIRE.link, bytes_per_s=rate), 1, 1.0, 0.005)
    fast = Wire(replace(WIRE.link, bytes_per_s=rate * faster), 1, 1.0, 0.005)
    before, after = (handoff_cost(cost, wire, num_tokens, chunk_tokens=chunk) for wire in (slow, fast))
    assert after.exposed_s <= before.exposed_s + 1e-12 and after.serial_s <= before.serial_s + 1e-12
    assert before.exposed_s <= before.serial_s + 1e-9  # streaming never exposes more than sending all of it afterwards
    assert before.exposed_s >= 0.005


def test_streaming_hides_all_but_the_last_layer_on_a_fast_link() -> None:
    cost = StepCost(LLAMA, MACHINE, visibility("full"))
    wire = Wire(replace(WIRE.link, latency_s=0.0), 1, 1.0, 0.0)
    handoff = handoff_cost(cost, wire, 32_769)
    assert handoff.exposed_s == pytest.approx(32_768 * 4096 / wire.bytes_per_s, rel=1e-9)


def test_late_projection_wins_bytes_above_two_skipped_layers() -> None:
    for depth, wins in ((30, False), (29, True)):  # h·e = 8192 B against (L−K)·4096 B
        late = handoff_bytes(LLAMA, visibility(f"pop:{depth}:late"), 4096).total
        assert (late < handoff_bytes(LLAMA, visibility(f"pop:{depth}"), 4096).total) is wins


def test_speed_at_128k_gives_the_papers_ratios() -> None:
    full = request_alone(LLAMA, visibility("full"), 131_072, MACHINE, MACHINE, WIRE)
    speed = request_alone(LLAMA, visibility("speed:24"), 131_072, MACHINE, MACHINE, WIRE)
    assert full.handoff.prefill_s / speed.handoff.prefill_s == pytest.approx(4 / 3, rel=1e-3)
    assert speed.kv_bytes / full.kv_bytes == pytest.approx(0.75, abs=1e-4)
    limit = [
        decode_step_s(StepCost(LLAMA, MACHINE, visibility("full")), batch, 131_072)
        / decode_step_s(StepCost(LLAMA, MACHINE, visibility("speed:24")), batch, 131_072)
        for batch in (1, 2, 4, 64)
    ]
    assert limit == sorted(limit) and limit[0] > 1.1 and limit[-1] < 4 / 3
