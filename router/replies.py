"""From a generation to the public messages. Translation and the arithmetic of its figures; knows no call."""

from collections.abc import Sequence

from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import decode_kv_layer_tokens, full_depth_wire_bytes, kv_bytes
from shoal.router.attempt import AttemptReport
from shoal.router.generation import Generation
from shoal.router.legs import DispatchRequest
from shoal.router.output import Answer, Delta, OutputToken, PromptLogprobs
from shoal.types import DType, ModelShape


def output_logprobs(tokens: Sequence[OutputToken]) -> shoal_pb2.OutputLogProbs | None:
    """None when the request asked for none."""
    asked = [token for token in tokens if token.logprob is not None]
    if not asked:
        return None
    return shoal_pb2.OutputLogProbs(
        token_logprobs=[token.logprob for token in asked if token.logprob is not None],
        token_ids=[token.token_id for token in asked],
        top_logprobs=[
            shoal_pb2.TopLogProbs(values=[value for _, value in token.top], token_ids=[token_id for token_id, _ in token.top])
            for token in asked
        ],
    )


def input_logprobs(prompt: PromptLogprobs | None) -> shoal_pb2.OutputLogProbs | None:
    """Of the prompt's tokens after the first; None when the request asked for none."""
    return None if prompt is None else output_logprobs(prompt.tokens)


def chunk_reply(generation: Generation, delta: Delta) -> shoal_pb2.GenerateResponse:
    """One delta of a stream."""
    return shoal_pb2.GenerateResponse(
        request_id=generation.admitted.request_id,
        chunk=shoal_pb2.GenerateStreamChunk(
            token_ids=[token.token_id for token in delta.tokens],
            text=delta.text,
            prompt_tokens=len(generation.admitted.dispatch.prompt_ids),
            completion_tokens=len(generation.answers[delta.index].tokens),
            cached_tokens=num_cached_tokens(generation),
            index=delta.index,
            output_logprobs=output_logprobs(delta.tokens),
            input_logprobs=input_logprobs(delta.prompt_logprobs),
        ),
    )


def complete_reply(
    generation: Generation, answer: Answer, shape: ModelShape, dtype: DType, now: float
) -> shoal_pb2.GenerateResponse:
    """The last message about one child, and the only one of a unary answer."""
    request = generation.admitted.dispatch
    complete = shoal_pb2.GenerateComplete(
        output_ids=answer.token_ids,
        text=answer.text,
        finish_reason=str(answer.finish_reason),
        prompt_tokens=len(request.prompt_ids),
        image_tokens=request.num_image_tokens,
        completion_tokens=len(answer.tokens),
        cached_tokens=num_cached_tokens(generation),
        prefill_cached_tokens=num_prefill_cached_tokens(generation.first_attempt),
        index=answer.index,
        output_logprobs=output_logprobs(answer.tokens),
        input_logprobs=input_logprobs(generation.prompt_logprobs) if answer.index == 0 else None,
        visibility=str(request.visibility),
        transfer=transfer_stats(generation.report.attempt, request, shape, dtype),
        timings=_timings(generation, answer, now),
        decode_kv=_decode_kv(generation, answer, shape, dtype),
        seed=request.sampling.seed,
        num_retries=generation.report.num_retries,
        num_preemptions=generation.report.num_preemptions,
        notices=generation.report.notices,
        requested_visibility=str(generation.admitted.requested or ""),
        visibility_reason=generation.admitted.reason,
    )
    if answer.matched_stop is not None:
        complete.matched_stop_str = answer.matched_stop
    elif answer.matched_token_id is not None:
        complete.matched_token_id = answer.matched_token_id
    return shoal_pb2.GenerateResponse(request_id=generation.admitted.request_id, complete=complete)


def num_cached_tokens(generation: Generation) -> int:
    """Prompt tokens that decode held already."""
    reserved = generation.first_attempt.reserved
    return 0 if reserved is None else reserved.cached_tokens


def num_prefill_cached_tokens(attempt: AttemptReport) -> int:
    """Prompt tokens that prefill did not run, since it had their KV."""
    return 0 if attempt.prefill is None else attempt.prefill.cached_tokens


def transfer_stats(attempt: AttemptReport, request: DispatchRequest, shape: ModelShape, dtype: DType) -> shoal_pb2.TransferStats:
    """What crossed for the request's latest attempt, all its children together."""
    stats = shoal_pb2.TransferStats(decode_worker=attempt.decode_worker, prefill_worker=attempt.prefill_worker)
    if attempt.reserved is not None:
        stats.prefill_at, stats.prefill_reason = attempt.reserved.prefill_at, attempt.reserved.prefill_reason
    if attempt.reserved is not None and attempt.reserved.num_entries:
        stats.plan_bytes = attempt.reserved.plan_bytes
        stats.num_entries = attempt.reserved.num_entries
        stats.full_depth_bytes = full_depth_wire_bytes(
            shape, dtype, request.visibility, len(request.prompt_ids), attempt.reserved.cached_tokens
        )
    # Both ends count at the channel. Decode's count comes in its last message, which a stop string or an abort forestalls.
    if attempt.finished:
        stats.payload_bytes = next(iter(attempt.finished.values())).received_payload_bytes
    elif attempt.prefill is not None:
        stats.payload_bytes = attempt.prefill.sent_payload_bytes
    return stats


def _decode_kv(generation: Generation, answer: Answer, shape: ModelShape, dtype: DType) -> shoal_pb2.KvStats:
    """As decode reports it; by the formula when the answer ended before decode's last message."""
    attempt, request = generation.report.attempt, generation.admitted.dispatch
    if (finished := attempt.finished.get(answer.index)) is not None:
        return shoal_pb2.KvStats(layer_tokens=finished.kv_layer_tokens, bytes=finished.kv_bytes)
    if attempt.reserved is None or not answer.tokens:
        return shoal_pb2.KvStats()
    num_pairs = decode_kv_layer_tokens(shape, request.visibility, len(request.prompt_ids), len(answer.tokens))
    return shoal_pb2.KvStats(layer_tokens=num_pairs, bytes=kv_bytes(shape, dtype, num_pairs))


def _timings(generation: Generation, answer: Answer, now: float) -> shoal_pb2.Timings:
    """Parts of TTFT in order. `prefill` and `transfer` are the own figures of who prefilled, `first_step` is the rest."""
    moments, attempt = generation.moments, generation.first_attempt
    timings = shoal_pb2.Timings(tokenize_ms=(moments.tokenized - moments.arrived) * 1e3, total_ms=(now - moments.arrived) * 1e3)
    if attempt.reserved_at is not None:
        timings.reserve_ms = (attempt.reserved_at - moments.tokenized) * 1e3
    if attempt.prefill is not None:
        timings.prefill_ms = attempt.prefill.queue_ms + attempt.prefill.compute_ms
        timings.transfer_ms = attempt.prefill.after_compute_ms
    elif (finished := attempt.finished.get(answer.index)) is not None:
        timings.prefill_ms = finished.prefill_ms
    if moments.first_token is not None:
        timings.ttft_ms = (moments.first_token - moments.arrived) * 1e3
        parts = timings.tokenize_ms + timings.reserve_ms + timings.prefill_ms + timings.transfer_ms
        timings.first_step_ms = max(0.0, timings.ttft_ms - parts)
        if len(answer.tokens) > 1:
            first, last = moments.spans[answer.index]
            timings.tpot_ms = (last - first) * 1e3 / (len(answer.tokens) - 1)
    return timings
