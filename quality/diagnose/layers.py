"""Per layer: what removing it would cost each phase, where decode tokens look, how states move. Knows a model and examples.

Virtual gates (POP, arXiv 2602.03295). A factor g = 1 on a layer's residual branches, one for prefill tokens and one for decode
tokens. The loss increase of g → 0, to second order, is −∂L/∂g + ½ ∂²L/∂g²; with labels drawn from the model itself the first
term is zero in expectation and the second is ½ E[(∂L/∂g)²] (Fisher information). One forward and one backward pass an example
give it for every layer, branch and phase at once.

Sight gates (ours, for SPEED). A factor between a decode token's attention over everything and its attention over the anchor and
decode tokens alone, per layer, estimated in the same pass: what not seeing the prompt there would cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import InvalidConfig
from shoal.quality.torch_model import IGNORED, Batch, DecoderLayer, Example, Gates, LayerTrace, TorchDecoder, make_batch
from shoal.visibility import Visibility, VisibilityKind

Progress = Callable[[int, int], None]  # examples done, of how many
_FULL: Final = Visibility(VisibilityKind.FULL, boundary_tokens=1)


@dataclass(frozen=True, slots=True)
class PhaseImportance:
    """Estimated loss increase in nats a response token when a layer is removed for one phase's tokens."""

    layer: float
    layer_error: float  # standard error over examples
    attention: float  # its attention branch alone
    mlp: float


@dataclass(frozen=True, slots=True)
class LayerDiagnosis:
    """One layer, means over examples. The first prompt token is the anchor."""

    layer: int
    prefill: PhaseImportance
    decode: PhaseImportance
    sight: float  # estimated loss increase when response tokens see only the anchor and decode tokens there
    sight_error: float
    mass_on_anchor: float  # share of response tokens' attention, over heads
    mass_on_prompt: float  # on prefill tokens other than the anchor
    mass_on_decode: float  # on boundary and response tokens
    prefill_drift: float  # 1 − cosine of what enters and leaves the layer, prefill tokens
    decode_drift: float
    prefill_to_last: float  # cosine of what leaves it and what leaves the last layer, prefill tokens


@dataclass(slots=True)
class _Sums:
    """One example's figures by layer."""

    anchor: list[float]
    prompt: list[float]
    prefill_drift: list[float]
    decode_drift: list[float]
    prefill_out: list[Tensor]


def diagnose_layers(
    model: TorchDecoder, examples: Sequence[Example], *, seed: int = 0, progress: Progress | None = None
) -> list[LayerDiagnosis]:
    """Every layer of the model under `full`, one example at a time.

    Raises InvalidConfig for examples without responses or with prompts of fewer than three tokens, and for NaN.
    """
    for example in examples:
        if not example.response_ids:
            raise InvalidConfig("an example has no response; importance is measured on the response's tokens")
        if len(example.prompt_ids) < 3:
            raise InvalidConfig("a prompt has fewer than three tokens; give longer prompts to diagnose")
    if not examples:
        raise InvalidConfig("there is no example to diagnose")
    model.requires_grad_(False)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    gradients, sights, sums = [], [], []
    for index, example in enumerate(examples):
        batch = make_batch([example], _FULL).to(device)
        looked: _Sums = _Sums([], [], [], [], [])
        phases, sight = _gate_gradients(model, batch, generator, looked)
        gradients.append(phases)
        sights.append(sight)
        sums.append(looked)
        if progress is not None:
            progress(index + 1, len(examples))
    stacked = torch.stack(gradients)  # [examples, phase, L, 2]
    squares = torch.stack(sights).double().square() / 2  # [examples, L]
    to_last = [[_cosine(out, own.prefill_out[-1]) for out in own.prefill_out] for own in sums]
    found = []
    for layer in range(model.num_layers):
        prefill, decode = (_importance(stacked[:, phase, layer]) for phase in (0, 1))
        anchor, prompt = (
            _mean([own[layer] for own in values]) for values in ([s.anchor for s in sums], [s.prompt for s in sums])
        )
        found.append(
            LayerDiagnosis(
                layer,
                prefill,
                decode,
                float(squares[:, layer].mean()),
                _error(squares[:, layer]),
                anchor,
                prompt,
                1 - anchor - prompt,
                _mean([own.prefill_drift[layer] for own in sums]),
                _mean([own.decode_drift[layer] for own in sums]),
                _mean([own[layer] for own in to_last]),
            )
        )
    return found


def _gate_gradients(model: TorchDecoder, batch: Batch, generator: torch.Generator, looked: _Sums) -> tuple[Tensor, Tensor]:
    """Gradients of the sampled labels' loss, divided by √tokens so that squares are per token: phases [2, L, 2], sight [L]."""
    device = batch.decode_ids.device
    phases = [torch.ones(1, model.num_layers, 2, requires_grad=True, device=device) for _ in range(2)]
    sight = torch.ones(1, model.num_layers, requires_grad=True, device=device)
    gates = Gates(prefill=phases[0], decode=phases[1], sight=sight)
    at = batch.targets[0] != IGNORED
    hidden = model(batch, gates=gates, trace=lambda trace: _look(model, trace, at, looked))
    scores = model.logits(hidden[0, at])
    if not bool(scores.isfinite().all()):
        raise InvalidConfig("the model gives scores that are no finite numbers (NaN or infinite); its weights are damaged")
    labels = torch.multinomial(scores.detach().softmax(-1), 1, generator=generator)[:, 0]
    loss = F.cross_entropy(scores, labels, reduction="sum") / math.sqrt(len(labels))
    loss.backward()  # type: ignore[no-untyped-call]
    found = [gate.grad if gate.grad is not None else torch.zeros_like(gate) for gate in (*phases, sight)]
    return torch.stack([grad[0] for grad in found[:2]]), found[2][0]


@torch.no_grad()
def _look(model: TorchDecoder, trace: LayerTrace, at: Tensor, looked: _Sums) -> None:
    """Attention mass of the rows at `at`, and drift."""
    num_decode = trace.decode_in.shape[1]
    num_prefill = trace.keys.shape[2] - num_decode
    groups = trace.decode_queries.shape[1] // trace.keys.shape[1]
    attention = cast(DecoderLayer, model.model.layers[trace.layer]).self_attn
    keys = trace.keys.repeat_interleave(groups, 1)
    shares = attention.shares(trace.decode_queries[:, :, at], keys, trace.seen[:, :, at]).mean((0, 1, 2))
    looked.anchor.append(float(shares[0]))
    looked.prompt.append(float(shares[1:num_prefill].sum()))
    assert trace.prefill_in is not None and trace.prefill_out is not None
    looked.prefill_drift.append(1 - _cosine(trace.prefill_in[0], trace.prefill_out[0]))
    looked.decode_drift.append(1 - _cosine(trace.decode_in[0, at], trace.decode_out[0, at]))
    looked.prefill_out.append(trace.prefill_out[0].detach())


def _importance(gradients: Tensor) -> PhaseImportance:
    """½ mean squares over examples of gradients [examples, 2]; one gate on both branches has the sum of theirs."""
    both = gradients.sum(1).double().square() / 2
    attention, mlp = (gradients.double().square().mean(0) / 2).tolist()
    return PhaseImportance(float(both.mean()), _error(both), attention, mlp)


def _error(values: Tensor) -> float:
    """Standard error of a mean; 0 of one value."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _cosine(a: Tensor, b: Tensor) -> float:
    """Mean over tokens [n, h]."""
    return float(F.cosine_similarity(a.float(), b.float(), dim=-1).mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
