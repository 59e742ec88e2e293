"""What both legs are told and what they say: between the router's own types and the internal protos. Makes no call."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.pb.internal.v1 import worker_pb2
from shoal.pb.v1 import shoal_pb2
from shoal.router.output import ChildEnd, Output, OutputToken, PromptLogprobs
from shoal.rpc.image_spans import image_to_pb, span_to_pb
from shoal.types import USUAL_TURN, FinishReason, PromptImage, SamplingParams, Turn
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """What both legs are told. `visibility` is resolved; `sampling.stop_token_ids` include EOS unless it is ignored."""

    request_id: str
    prompt_ids: tuple[int, ...]
    visibility: Visibility
    sampling: SamplingParams
    deadline: float  # of the event loop's clock
    num_children: int = 1  # n
    prompt_logprobs: int | None = None  # then the whole prompt is boundary
    continuation_ids: tuple[int, ...] = ()  # to be scored; then nothing is sampled
    notices: tuple[str, ...] = ()  # what was declared on admission
    turn: Turn = USUAL_TURN
    cache_salt: str = ""  # the request's own, within its tenant
    arrived: float = field(default_factory=time.monotonic, compare=False)  # by the event loop's clock
    is_shadow: bool = False  # a replay (shadow.py): not counted, not tried again, and nothing of it is kept
    images: tuple[PromptImage, ...] = ()  # all of them among the prefill tokens

    @property
    def placed_visibility(self) -> Visibility:
        """What a worker must allow. Prompt log-probabilities run the whole prompt on decode, whatever its boundary limit."""
        return self.visibility if self.prompt_logprobs is None else replace(self.visibility, boundary_tokens=1)

    @property
    def num_expected_tokens(self) -> int:
        """Of the longest answer."""
        return len(self.continuation_ids) or self.sampling.max_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return self.visibility.split(len(self.prompt_ids)).num_prefill_tokens

    @property
    def num_image_tokens(self) -> int:
        return sum(image.span.num_tokens for image in self.images)


def decode_message(
    request: DispatchRequest, replays: Mapping[int, tuple[int, ...]], local_prefill: worker_pb2.LocalPrefill, caller: str
) -> worker_pb2.DecodeRequest:
    """What decode is asked. `replays`: the children that still run, and what each has generated so far. `caller`: who asks."""
    message = worker_pb2.DecodeRequest(
        request_id=request.request_id,
        caller=caller,
        prompt_ids=request.prompt_ids,
        visibility=str(request.visibility),
        num_children=request.num_children,
        prompt_logprobs=request.prompt_logprobs,
        continuation_ids=request.continuation_ids,
        priority=str(request.turn.priority),
        tenant=request.turn.tenant,
        local_prefill=local_prefill,
        cache_salt=request.cache_salt,
        background=request.is_shadow,
        images=[span_to_pb(image.span) for image in request.images],
        age_s=max(0.0, time.monotonic() - request.arrived),
    )
    sampling = request.sampling
    if request.num_children == 1:
        if replayed := replays[0]:
            message.replay_token_ids.extend(replayed)
            sampling = replace(
                sampling,
                max_tokens=sampling.max_tokens - len(replayed),
                min_tokens=max(0, sampling.min_tokens - len(replayed)),
            )
    elif len(replays) < request.num_children or any(replays.values()):
        for index, token_ids in replays.items():
            message.child_replays.add(
                index=index,
                token_ids=token_ids,
                max_tokens=sampling.max_tokens - len(token_ids),
                min_tokens=max(0, sampling.min_tokens - len(token_ids)),
            )
    message.sampling.CopyFrom(_sampling(sampling))
    return message


def prefill_message(request: DispatchRequest, reserved: worker_pb2.Reserved, decode_address: str) -> worker_pb2.PrefillRequest:
    """What prefill is asked, once decode has reserved. `decode_address` holds unless the reservation names another."""
    return worker_pb2.PrefillRequest(
        request_id=request.request_id,
        attempt_id=reserved.attempt_id,
        prompt_ids=request.prompt_ids[: request.num_prefill_tokens],
        num_prompt_tokens=len(request.prompt_ids),
        visibility=str(request.visibility),
        cached_tokens=reserved.cached_tokens,
        plan_digest=reserved.plan_digest,
        decode_address=reserved.transfer_address or decode_address,
        decode_worker_id=reserved.worker_id,
        decode_epoch=reserved.epoch,
        priority=str(request.turn.priority),
        tenant=request.turn.tenant,
        cache_salt=request.cache_salt,
        background=request.is_shadow,
        images=[image_to_pb(image) for image in request.images],
    )


def read_tokens(request: DispatchRequest, message: worker_pb2.SampledTokens) -> list[Output]:
    """What one message of decode says, log-probabilities of the prompt first."""
    outputs: list[Output] = []
    if message.prompt_logprobs:
        ids = request.prompt_ids[1:]
        outputs.append(PromptLogprobs(_tokens(ids, message.prompt_logprobs, message.prompt_top_logprobs, 0)))
    return [*outputs, *_tokens(message.token_ids, message.logprobs, message.top_logprobs, message.index)]


def _tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[shoal_pb2.TopLogProbs], index: int
) -> tuple[OutputToken, ...]:
    if not logprobs:
        return tuple(OutputToken(token_id, index=index) for token_id in token_ids)
    best: list[tuple[tuple[int, float], ...]] = [tuple(zip(top.token_ids, top.values, strict=True)) for top in tops]
    best = best or [()] * len(token_ids)
    return tuple(
        OutputToken(token_id, logprob, top, index) for token_id, logprob, top in zip(token_ids, logprobs, best, strict=True)
    )


def _sampling(sampling: SamplingParams) -> worker_pb2.Sampling:
    constraint = sampling.constraint
    return worker_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        constraint=None if constraint is None else worker_pb2.Constraint(**{str(constraint.kind): constraint.text}),
    )


def read_end(message: worker_pb2.Finished) -> ChildEnd:
    """How one child ended."""
    matched = message.matched_token_id if message.HasField("matched_token_id") else None
    return ChildEnd(message.index, FinishReason(message.finish_reason), matched)
