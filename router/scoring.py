"""Scores a continuation: runs the dispatch, gathers log-probabilities, sums them. Knows no sampling and no text."""

import asyncio
from contextlib import aclosing

from shoal.errors import Cancelled, InternalError
from shoal.pb.v1 import shoal_pb2
from shoal.router.admission import Admitted
from shoal.router.dispatch import Dispatch, DispatchReport
from shoal.router.output import OutputToken
from shoal.router.replies import num_prefill_cached_tokens, output_logprobs, transfer_stats
from shoal.types import DType, ModelShape


async def gather_scores(dispatch: Dispatch) -> list[OutputToken]:
    """Run it; one for each continuation token, each with its log-probability. Leaving early ends both legs."""
    tokens: list[OutputToken] = []
    async with aclosing(dispatch.outputs()) as batches:
        async for batch in batches:
            tokens += [output for output in batch if isinstance(output, OutputToken)]
    wanted, num_scored = dispatch.continuation_ids, sum(token.logprob is not None for token in tokens)
    if tuple(token.token_id for token in tokens) != wanted or num_scored != len(wanted):
        raise InternalError(f"{num_scored} of {len(wanted)} tokens were scored")
    return tokens


class Scoring:
    """One request to Score."""

    def __init__(self, admitted: Admitted, dispatch: Dispatch) -> None:
        self.admitted = admitted
        self._dispatch = dispatch
        self._gathering: asyncio.Task[list[OutputToken]] | None = None
        self._aborted = False

    @property
    def report(self) -> DispatchReport:
        """How it was served."""
        return self._dispatch.report

    def abort(self) -> None:
        """End it now; there is no such thing as half a score."""
        self._aborted = True
        if self._gathering is not None:
            self._gathering.cancel()

    async def run(self, shape: ModelShape, dtype: DType) -> shoal_pb2.ScoreResponse:
        """Leaving early (a cancelled call) ends both legs. Raises Cancelled when it was aborted."""
        self._gathering = asyncio.create_task(gather_scores(self._dispatch))
        try:
            await asyncio.wait({self._gathering})
        finally:
            self._gathering.cancel()
            await asyncio.wait({self._gathering})
        if self._gathering.cancelled() or self._aborted:
            raise Cancelled("the request was aborted")
        return self._reply(self._gathering.result(), shape, dtype)

    def _reply(self, tokens: list[OutputToken], shape: ModelShape, dtype: DType) -> shoal_pb2.ScoreResponse:
        request = self.admitted.dispatch
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        attempt = self._dispatch.report.attempt
        num_top = request.sampling.num_logprobs or 0
        return shoal_pb2.ScoreResponse(
            request_id=request.request_id,
            logprobs=output_logprobs([OutputToken(t.token_id, t.logprob, t.top[:num_top]) for t in tokens]),
            total_logprob=sum(logprobs),
            is_greedy=all(logprob >= token.top[0][1] for token, logprob in zip(tokens, logprobs, strict=True)),
            prompt_tokens=len(request.prompt_ids),
            visibility=str(request.visibility),
            cached_tokens=attempt.reserved.cached_tokens if attempt.reserved is not None else 0,
            prefill_cached_tokens=num_prefill_cached_tokens(attempt),
            transfer=transfer_stats(attempt, request, shape, dtype),
        )
