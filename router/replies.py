"""From a generation to the public messages. Translation and the arithmetic of its figures; knows no call."""

from collections.abc import Sequence

from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import decode_kv_layer_tokens, full_depth_wire_bytes, kv_bytes
from shoal.router.generation import Generation
from shoal.router.output import Delta, OutputToken
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


def chunk_reply(generation: Generation, delta: Delta, num_completion_tokens: int) -> shoal_pb2.GenerateResponse:
    """One delta of a stream."""
    return shoal_pb2.GenerateResponse(
        request_id=generation.admitted.request_id,
        chunk=shoal_pb2.GenerateStreamChunk(
            token_ids=[token.token_id for token in delta.tokens],
            text=delta.text,
            prompt_tokens=len(generation.admitted.dispatch.prompt_ids),
            completion_tokens=num_completion_tokens,
            cached_tokens=num_cached_tokens(generation),
            output_logprobs=output_logprobs(delta.tokens),
        ),
    )


def complete_reply(generation: Generation, shape: ModelShape, dtype: DType, now: float) -> shoal_pb2.GenerateResponse:
    """The last message of a stream, and the only one of a unary answer."""
    answer, request = generation.answer, generation.admitted.dispatch
    complete = shoal_pb2.GenerateComplete(
        output_ids=answer.token_ids,
        text=answer.text,
        finish_reason=str(answer.finish_reason),
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(answer.tokens),
        cached_tokens=num_cached_tokens(generation),
        output_logprobs=output_logprobs(answer.tokens),
        visibility=str(request.visibility),
        transfer=_transfer(generation, shape, dtype),
        timings=_timings(generation, now),
        decode_kv=_decode_kv(generation, shape, dtype),
        seed=request.sampling.seed,
        num_retries=generation.report.num_retries,
        notices=generation.report.notices,
    )
    if answer.matched_stop is not None:
        complete.matched_stop_str = answer.matched_stop
    elif answer.matched_token_id is not None:
        complete.matched_token_id = answer.matched_token_id
    return shoal_pb2.GenerateResponse(request_id=generation.admitted.request_id, complete=complete)


def num_cached_tokens(generation: Generation) -> int:
    """Prompt tokens that decode held already."""
    reserved = generation.report.attempt.reserved
    return 0 if reserved is None else reserved.cached_tokens


def _transfer(generation: Generation, shape: ModelShape, dtype: DType) -> shoal_pb2.TransferStats:
    attempt, request = generation.report.attempt, generation.admitted.dispatch
    stats = shoal_pb2.TransferStats(decode_worker=attempt.decode_worker, prefill_worker=attempt.prefill_worker)
    if attempt.reserved is not None and attempt.reserved.num_entries:
        stats.plan_bytes = attempt.reserved.plan_bytes
        stats.num_entries = attempt.reserved.num_entries
        stats.full_depth_bytes = full_depth_wire_bytes(
            shape, dtype, request.visibility, len(request.prompt_ids), attempt.reserved.cached_tokens
        )
    # Both ends count at the channel. Decode's count comes in its last message, which a stop string or an abort forestalls.
    if attempt.finished is not None:
        stats.payload_bytes = attempt.finished.received_payload_bytes
    elif attempt.prefill is not None:
        stats.payload_bytes = attempt.prefill.sent_payload_bytes
    return stats


def _decode_kv(generation: Generation, shape: ModelShape, dtype: DType) -> shoal_pb2.KvStats:
    """As decode reports it; by the formula when the answer ended before decode's last message."""
    finished, request = generation.report.attempt.finished, generation.admitted.dispatch
    if finished is not None:
        return shoal_pb2.KvStats(layer_tokens=finished.kv_layer_tokens, bytes=finished.kv_bytes)
    if generation.report.attempt.reserved is None or not generation.answer.tokens:
        return shoal_pb2.KvStats()
    num_pairs = decode_kv_layer_tokens(shape, request.visibility, len(request.prompt_ids), len(generation.answer.tokens))
    return shoal_pb2.KvStats(layer_tokens=num_pairs, bytes=kv_bytes(shape, dtype, num_pairs))


def _timings(generation: Generation, now: float) -> shoal_pb2.Timings:
    """Parts of TTFT in order. `prefill` and `transfer` are the prefill worker's own figures, `first_step` is the rest."""
    moments, attempt = generation.moments, generation.first_attempt
    timings = shoal_pb2.Timings(tokenize_ms=(moments.tokenized - moments.arrived) * 1e3, total_ms=(now - moments.arrived) * 1e3)
    if attempt.reserved_at is not None:
        timings.reserve_ms = (attempt.reserved_at - moments.tokenized) * 1e3
    if attempt.prefill is not None:
        timings.prefill_ms = attempt.prefill.queue_ms + attempt.prefill.compute_ms
        timings.transfer_ms = attempt.prefill.after_compute_ms
    if moments.first_token is not None and moments.last_token is not None:
        timings.ttft_ms = (moments.first_token - moments.arrived) * 1e3
        parts = timings.tokenize_ms + timings.reserve_ms + timings.prefill_ms + timings.transfer_ms
        timings.first_step_ms = max(0.0, timings.ttft_ms - parts)
        if len(generation.answer.tokens) > 1:
            later = len(generation.answer.tokens) - 1
            timings.tpot_ms = (moments.last_token - moments.first_token) * 1e3 / later
    return timings
