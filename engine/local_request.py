"""What the single-process engine is asked, hands out, and keeps of a request that runs. Knows segments; decides no step."""

from dataclasses import dataclass, replace

from shoal.engine.sampling import SampleRow, TokenConstraint, TokenCounts, Want
from shoal.engine.segment import RequestKv, Segment, local_prefill_segments, scored_segments
from shoal.errors import Unsupported
from shoal.placement.batching import Chunk
from shoal.placement.tables import RequestTables
from shoal.types import FinishReason, PromptImage, SamplingParams, TokenLogprobs
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What to generate. The visibility need not be resolved; an absent boundary becomes 1."""

    prompt_ids: tuple[int, ...]
    visibility: Visibility
    sampling: SamplingParams  # max_tokens counts what is still to be sampled
    replay_token_ids: tuple[int, ...] = ()  # generated before; run as decode tokens, not handed out again
    child: int = 0  # which of several answers to one request
    prompt_logprobs: int | None = None  # `full` only: how many beside each prompt token after the first; then b = N
    continuation_ids: tuple[int, ...] = ()  # to be scored as decode tokens; then nothing is sampled
    images: tuple[PromptImage, ...] = ()  # in the order of their places in the prompt

    @property
    def num_answer_tokens(self) -> int:
        """At most, replayed ones included."""
        return len(self.continuation_ids) or len(self.replay_token_ids) + self.sampling.max_tokens

    def children(self, num_children: int) -> list["LocalRequest"]:
        """Several answers to the same prompt, each a request of its own: the reference shares nothing between them."""
        return [replace(self, child=child) for child in range(num_children)]

    def resolve(self, num_layers: int) -> Visibility:
        """The visibility it runs under. Raises Unsupported when prompt log-probabilities are asked for beside `full`."""
        visibility = self.visibility.resolve(num_layers)
        if self.prompt_logprobs is None:
            return visibility
        if visibility.kind is not VisibilityKind.FULL:
            raise Unsupported(f"prompt_logprobs need visibility full, not '{visibility.policy}'")
        return replace(visibility, boundary_tokens=max(1, len(self.prompt_ids)))


@dataclass(frozen=True, slots=True)
class LocalToken:
    """One token of one request, sampled or scored, as a step hands it out."""

    key: str
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None  # set on the last one


@dataclass(frozen=True, slots=True)
class LocalResult:
    """A whole answer. A stop id is part of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens after the first, where asked for


@dataclass(slots=True)
class RunningRequest:
    """A request that owns its blocks."""

    request: LocalRequest  # its stop_token_ids include EOS unless ignored
    tables: RequestTables
    kv: RequestKv
    tokens: list[int]  # prompt, replayed, generated; or prompt and continuation
    counts: TokenCounts | None
    constraint: TokenConstraint | None
    num_sampled: int = 0
    num_scored: int = 0

    @property
    def targets(self) -> range:
        """Positions of the given tokens whose scores are asked for."""
        num_prompt = len(self.request.prompt_ids)
        if self.request.continuation_ids:
            return range(num_prompt, len(self.tokens))
        return range(1, num_prompt) if self.request.prompt_logprobs is not None else range(0)

    def scored(self, chunk: Chunk) -> range:
        """Positions of a chunk whose logits score the token after them."""
        return range(max(chunk.start, self.targets.start - 1), min(chunk.stop, self.targets.stop - 1))

    def draws(self, chunk: Chunk) -> bool:
        """Whether a token is drawn after a chunk."""
        return chunk.stop == len(self.tokens)

    def want(self, chunk: Chunk) -> Want:
        """What a chunk with decode tokens wants of its logits."""
        request, scored = self.request, self.scored(chunk)
        num_top = request.sampling.num_logprobs if request.continuation_ids else request.prompt_logprobs
        row = SampleRow(request.sampling, request.child, len(self.tokens), self.num_sampled, self.counts, self.constraint)
        ids = self.tokens[scored.start + 1 : scored.stop + 1] if scored else []
        return Want([row] if self.draws(chunk) else [], ids, num_top or 0)

    def segments(self, chunk: Chunk) -> list[Segment]:
        """What one chunk runs: prefill tokens, then decode tokens, which see in the same step what the former leave."""
        first = max(chunk.start, min(chunk.stop, self.tables.layout.split.num_prefill_tokens))
        prefill, decode = range(chunk.start, first), range(first, chunk.stop)
        segments = local_prefill_segments(self.kv, self.tokens[chunk.start : first], prefill) if prefill else []
        if decode:
            ids = self.tokens[first : chunk.stop]
            segments += scored_segments(self.kv, ids, decode, self.scored(chunk), draws=self.draws(chunk))
        return segments
