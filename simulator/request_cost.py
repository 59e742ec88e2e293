"""One request alone on idle workers: TTFT, TPOT, KV held. Knows formulas 1–4 together; knows no queue and no other request."""

from dataclasses import dataclass

from shoal.placement.arithmetic import decode_kv_layer_tokens
from shoal.placement.cost import kv_layer_tokens_read, request_cost
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.step_cost import StepCost, StepWork, chunks
from shoal.simulator.transfer_cost import HandoffCost, Wire, handoff_cost
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class RequestAlone:
    """Seconds of the parts of TTFT, and bytes of KV on the decode worker."""

    handoff: HandoffCost
    first_step_s: float
    tpot_s: float  # of the first token after the prompt
    kv_bytes: float  # active KV after the first token
    request_s: float = 0.0  # router and reply

    @property
    def ttft_s(self) -> float:
        return self.request_s + self.handoff.prefill_s + self.handoff.exposed_s + self.first_step_s


def first_step_s(cost: StepCost, num_prompt_tokens: int) -> float:
    """The step that runs anchors and boundary tokens (and late projections) and samples the first token, alone.

    Source: placement's decode leg of one token (its attention pairs), formula 2.
    """
    visibility, shape = cost.visibility, cost.model.shape
    split = visibility.split(num_prompt_tokens)
    num_boundary = num_prompt_tokens - split.num_prefill_tokens
    pairs = request_cost(shape, visibility, num_prompt_tokens, 1).decode.attention_flops // (4 * shape.num_heads * shape.head_dim)
    return cost.step_s(
        StepWork(
            num_rows=1,
            num_kv_layer_tokens=kv_layer_tokens_read(shape, visibility, num_prompt_tokens, num_boundary),
            num_chunk_tokens=num_boundary - 1,
            num_pairs=pairs if num_boundary > 1 else 0,
            num_deep_tokens=split.num_anchor_tokens if cost.num_upper else 0,
            num_projected_tokens=split.num_prefill_tokens if visibility.late else 0,
        )
    )


def colocated_ttft_s(cost: StepCost, num_prompt_tokens: int, token_budget: int) -> float:
    """A prompt alone on a worker that runs it and answers: the step of its last chunk samples the first token as well."""
    visibility, shape = cost.visibility, cost.model.shape
    split, num_layers = visibility.split(num_prompt_tokens), cost.model.shape.num_layers
    total = 0.0
    for start, stop in chunks(0, num_prompt_tokens, token_budget):
        num_prefill = max(0, min(stop, split.num_prefill_tokens) - start)
        num_decode = stop - start - num_prefill
        samples = stop == num_prompt_tokens
        read = kv_layer_tokens_read(shape, visibility, num_prompt_tokens, num_decode) if samples else 0
        total += cost.step_s(
            StepWork(
                num_rows=int(samples),
                num_kv_layer_tokens=read,
                num_chunk_tokens=num_decode - int(samples),
                num_pairs=cost.lower_pairs(start, start + num_prefill),
                num_deep_tokens=split.num_anchor_tokens if num_decode and visibility.depth(num_layers) < num_layers else 0,
                num_prefill_tokens=num_prefill,
            )
        )
    return total


def decode_step_s(cost: StepCost, batch: int, num_prompt_tokens: int, num_generated: int = 1) -> float:
    """TPOT of `batch` equal requests, each with N prompt tokens and g generated ones (formula 2)."""
    visibility = cost.visibility
    num_decode = num_prompt_tokens - visibility.split(num_prompt_tokens).num_prefill_tokens + num_generated
    read = batch * kv_layer_tokens_read(cost.model.shape, visibility, num_prompt_tokens, num_decode)
    return cost.step_s(StepWork(num_rows=batch, num_kv_layer_tokens=read))


def request_alone(
    model: ModelSpec,
    visibility: Visibility,
    num_prompt_tokens: int,
    prefill: Machine,
    decode: Machine,
    wire: Wire,
    *,
    num_cached: int = 0,
    chunk_tokens: int | None = None,
) -> RequestAlone:
    """A request of N tokens on a prefill and a decode worker that do nothing else."""
    decode_cost = StepCost(model, decode, visibility)
    handoff = handoff_cost(
        StepCost(model, prefill, visibility), wire, num_prompt_tokens, num_cached=num_cached, chunk_tokens=chunk_tokens
    )
    held = decode_kv_layer_tokens(model.shape, visibility, num_prompt_tokens, 1)
    return RequestAlone(
        handoff,
        first_step_s(decode_cost, num_prompt_tokens),
        decode_step_s(decode_cost, 1, num_prompt_tokens),
        held * model.kv_token_bytes * decode.replication(model),
        prefill.profile.request_s,
    )
