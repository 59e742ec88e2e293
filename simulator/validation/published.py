"""The published figures the cost model must reproduce, and ours for the same inputs. Reads no files.

Sources: SPEED (arXiv 2605.06105), POP (arXiv 2602.03295), Mooncake's and Splitwise's published transfer times.
"""

from shoal.simulator.catalogues import Catalogues
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.profiles import PROFILES, Profile
from shoal.simulator.request_cost import decode_step_s, first_step_s, request_alone
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire, handoff_bytes, handoff_cost
from shoal.simulator.validation.rows import Comparison, Use
from shoal.visibility import Visibility

_128K = 131_072
_MOONCAKE_MS = {128: 0.54, 512: 0.92, 2_048: 2.51, 8_192: 8.84, 16_384: 16.43, 32_768: 31.65}
_SPLITWISE_MS = {"a100": (8.0, "IB_HDR_200Gb"), "h100": (5.0, "IB_NDR_400Gb")}
_POP = {"llama-3.1-8b": (22, 1.36), "gemma-3-12b": (32, 1.37)}


def comparisons() -> list[Comparison]:
    """Every row, in the order of docs/validation.md."""
    names = Catalogues.shipped()
    machines = [(gpu, Machine(names.gpu(gpu), PROFILES[f"kernels-{gpu}"])) for gpu in ("a100", "h100")]
    rows = _speed(names, machines) + _pop(names, machines)
    return rows + _mooncake(names) + _splitwise(names, machines) + _late(names)


def _resolved(text: str, model: ModelSpec) -> Visibility:
    return Visibility.parse(text).resolve(model.shape.num_layers)


def _speed(names: Catalogues, machines: list[tuple[str, Machine]]) -> list[Comparison]:
    model, source, rows = names.model("llama-3.1-8b"), "arXiv 2605.06105", []
    full, speed = _resolved("full", model), _resolved("speed:24", model)
    for gpu, machine in machines:
        costs = [StepCost(model, machine, visibility) for visibility in (full, speed)]
        inputs = f"Llama-3.1-8B, K = 24, N = 131,072, one {machine.gpu.name}, profile {machine.profile.name}"
        ttft = [cost.prefill_s(_128K - 1) + first_step_s(cost, _128K) for cost in costs]
        rows.append(Comparison("SPEED: TTFT gain", Use.PREDICT, inputs, 1.333, ttft[0] / ttft[1], "×", source, 0.01))
        for batch in (2, 3):
            gain = decode_step_s(costs[0], batch, _128K) / decode_step_s(costs[1], batch, _128K)
            low, high = (1.0, 1.22) if batch == 2 else (1.22, 4 / 3)
            what = f"SPEED: TPOT gain at B = {batch} ({'at most' if batch == 2 else 'at least'} 1.22)"
            rows.append(Comparison(what, Use.PREDICT, inputs, low, gain, "×", source, 0.0, high))
        limit = decode_step_s(costs[0], 10_000, _128K) / decode_step_s(costs[1], 10_000, _128K)
        rows.append(Comparison("SPEED: TPOT gain, limit", Use.PREDICT, f"{inputs}, B = 10,000", 1.333, limit, "×", source, 0.01))
        wire = Wire.of(names.link("IB_HDR_200Gb"), machine)
        kv = [request_alone(model, visibility, _128K, machine, machine, wire).kv_bytes for visibility in (full, speed)]
        if gpu == "a100":
            rows.append(Comparison("SPEED: active KV left", Use.PREDICT, inputs, 0.75, kv[1] / kv[0], "of full", source, 0.001))
    return rows


def _pop(names: Catalogues, machines: list[tuple[str, Machine]]) -> list[Comparison]:
    source, rows = "arXiv 2602.03295; its GPU is not known to us, so both", []
    for name, (depth, published) in _POP.items():
        model = names.model(name)
        for _, machine in machines:
            inputs = f"{model.name}, K = {depth} of {model.shape.num_layers}, N = 2,048, boundary fused, {machine.profile.name}"
            gain = pop_gain(model, machine, depth, 2_048)
            rows.append(Comparison("POP: TTFT gain", Use.PREDICT, inputs, published, gain, "×", source, 0.03))
    model = names.model("llama-3.1-8b")
    for _, machine in machines:
        inputs = f"{model.name}, K = 22 of 32, N = 256, boundary fused, {machine.profile.name}"
        gain = pop_gain(model, machine, 22, 256)
        rows.append(Comparison("POP: TTFT gain, short prompt", Use.PREDICT, inputs, 1.02, gain, "×", source, 0.03, 1.05))
    return rows


def pop_gain(model: ModelSpec, machine: Machine, depth: int, num_tokens: int) -> float:
    """TTFT of full depth over `pop`'s on one device, the boundary token in the same pass.

    `pop` then also reads the upper layers' weights and their KV once, for one token; both read the LM head.
    """
    num_layers = model.shape.num_layers
    full = StepCost(model, machine, _resolved("full", model))
    pop = StepCost(model, machine, _resolved(f"pop:{depth}", model))
    head_s = model.head_weights * model.weight_bytes / machine.weight_bytes_per_s
    upper = sum(model.read_weights(layer, 1) for layer in range(depth, num_layers))
    upper_s = upper * model.weight_bytes / machine.weight_bytes_per_s + (num_layers - depth) * machine.profile.layer_s
    windows = [model.shape.window(layer) for layer in range(depth, num_layers)]
    read = sum(num_tokens if window is None else min(num_tokens, window) for window in windows)
    upper_s += read * model.kv_token_bytes / machine.kv_bytes_per_s(model)
    return (full.prefill_s(num_tokens) + head_s) / (pop.prefill_s(num_tokens) + head_s + upper_s)


def _mooncake(names: Catalogues) -> list[Comparison]:
    model, gpu, rows = names.model("qwen3-8b"), names.gpu("h100"), []
    machine = Machine(gpu, PROFILES["kernels-h100"], 8)
    wire = Wire.of(names.link("IB_HDR_200Gb"), machine)
    for num_tokens, published in _MOONCAKE_MS.items():
        full = Visibility(boundary_tokens=1)  # the published transfer is of all tokens, so one more stands at decode
        num_bytes = handoff_bytes(model, full, num_tokens + 1).total
        ours = 1e3 * (model.shape.num_layers * wire.latency_s + num_bytes / wire.bytes_per_s)
        inputs = f"Qwen3-8B TP8, {num_tokens:,} tokens, 8 × RoCE (200 Gb/s assumed), 36 messages"
        rows.append(Comparison("Mooncake: transfer", Use.FIT, inputs, published, ours, "ms", "Mooncake, H800", 0.05))
    return rows


def _splitwise(names: Catalogues, machines: list[tuple[str, Machine]]) -> list[Comparison]:
    model, rows = names.model("llama-2-70b"), []
    for gpu, machine in machines:
        published, link = _SPLITWISE_MS[gpu]
        wide = Machine(machine.gpu, machine.profile, 8)
        wire = Wire.of(names.link(link), wide)
        for num_tokens in (512, 2_048):
            ours = 1e3 * handoff_cost(StepCost(model, wide, _resolved("full", model)), wire, num_tokens).exposed_s
            inputs = f"Llama-2-70B TP8, N = {num_tokens:,}, {gpu.upper()}, {link}, layer-wise"
            rows.append(Comparison("Splitwise: exposed transfer", Use.FIT, inputs, published, ours, "ms", "Splitwise", 0.05))
    return rows


def _late(names: Catalogues) -> list[Comparison]:
    rows = []
    for name, published in (("llama-3.1-8b", 2), ("llama-3.1-70b", 4)):
        model = names.model(name)
        num_layers = model.shape.num_layers

        def total(text: str, model: ModelSpec = model) -> float:
            return handoff_bytes(model, _resolved(text, model), 4_096).total

        wins = [s for s in range(1, num_layers) if total(f"pop:{num_layers - s}:late") < total(f"pop:{num_layers - s}")]
        inputs = f"{model.name}, N = 4,096, bfloat16"
        what = "late projection: most skipped layers without a gain in bytes"
        rows.append(Comparison(what, Use.PREDICT, inputs, published, min(wins) - 1, "layers", "(L−K)·kb > h·e", 0.0))
    return rows


def fitted_constants(profile: Profile) -> str:
    """A profile's numbers as one line."""
    return (
        f"e_g {profile.gemm:g} · e_a {profile.attention:g} · e_w {profile.weight_read:g} · e_kv {profile.kv_read:g} · "
        f"n_half {profile.num_half_tokens:g} · t_layer {1e6 * profile.layer_s:g} µs · t_step {1e6 * profile.step_s:g} µs · "
        f"link {profile.link:g} · {1e6 * profile.transfer_step_s:g} µs per message · t_handoff {1e3 * profile.handoff_s:g} ms"
    )
