"""What shallow prefill gains in one process: first token and decode step of each visibility, beside full depth."""

from functools import partial

from benchmarks.bench import Bench
from benchmarks.sections.in_process import decoder, engine_bench
from benchmarks.tables import Row, Table
from shoal.model_files import open_model
from shoal.placement.arithmetic import kv_bytes
from shoal.placement.cost import kv_layer_tokens_read, layer_weights, request_cost
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

NAME = "shallow"
TITLE = "Shallow prefill"
_SHORT = (16, 64)  # prompts at which nothing can be gained, and nothing may be lost


def visibilities(num_layers: int) -> list[str]:
    """The depths at which SmolLM2 is measured, 22 and 20 of 30, in proportion."""
    return ["full", f"speed:{round(num_layers * 22 / 30)}", f"pop:{round(num_layers * 20 / 30)}"]


def run(bench: Bench) -> list[Table]:
    options = bench.options
    shape, dtype = open_model(options.model).config.shape, DType(options.dtype)
    texts, own = visibilities(shape.num_layers), decoder(options.model, options.dtype)
    first, steps, flops, reads = [], [], [], []
    for length in (*_SHORT, *options.lengths):
        engine = engine_bench(options, length * len(texts))
        runs = {text: partial(engine.first_token, own, text, length) for text in texts}
        first.append(Row(f"{length:,}", {text: tuple(ms) for text, ms in engine.interleaved(runs, options.repeats).items()}))
        kept = {text: engine.reserve(text, length) for text in texts}
        runs = {text: partial(engine.step, own, [kv], length) for text, (_, kv) in kept.items()}
        steps.append(Row(f"{length:,}", {text: tuple(ms) for text, ms in engine.interleaved(runs, 4 * options.repeats).items()}))
        flops.append(_ratios(f"{length:,}", {text: _flops(shape, text, length) for text in texts}))
        reads.append(_ratios(f"{length:,}", {text: _bytes(shape, dtype, text, length) for text in texts}))
        bench.say(f"visibilities at {length} tokens: done")
    whole = "Prefill and the boundary token's step, the engine alone, one request. By FLOPs (placement/cost.py), full / other: "
    step = "One request. By the bytes of weights and KV that a step reads, full / other: "
    return [
        Table(f"{TITLE}: first token", "prompt tokens", "ms", tuple(first), base="full", note=whole + "; ".join(flops) + "."),
        Table(
            f"{TITLE}: one decode step", "tokens of context", "ms", tuple(steps), base="full", note=step + "; ".join(reads) + "."
        ),
    ]


def _flops(shape: ModelShape, text: str, length: int) -> int:
    cost = request_cost(shape, Visibility.parse(text).resolve(shape.num_layers), length, 1)
    return cost.prefill.flops + cost.decode.flops


def _bytes(shape: ModelShape, dtype: DType, text: str, length: int) -> int:
    """Of one step that runs one token behind `length` tokens of prompt."""
    weights = shape.num_layers * layer_weights(shape) + shape.vocab_size * shape.hidden_size
    read = kv_layer_tokens_read(shape, Visibility.parse(text).resolve(shape.num_layers), length, 1)
    return weights * dtype.num_bytes + kv_bytes(shape, dtype, read)


def _ratios(label: str, values: dict[str, int]) -> str:
    others = [f"{text} {values['full'] / value:.2f}" for text, value in values.items() if text != "full"]
    return f"{label} tokens: {', '.join(others)}"
