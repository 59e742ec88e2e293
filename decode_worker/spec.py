"""What is asked of a decode worker, and whether it can be done at all. Knows limits; knows no load.

A worker checks for itself what the router has checked: it must not depend on who calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.config.disaggregation import NEVER_LOCAL, DisaggregationRule
from shoal.config.worker import WorkerConfig
from shoal.errors import InvalidRequest, Unsupported
from shoal.model_files import VisionConfig, check_images
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.prefix_keys import cache_key
from shoal.placement.tables import KvLayout
from shoal.rpc.image_spans import spans_from_pb
from shoal.types import USUAL_TURN, Constraint, ConstraintKind, ImageSpan, ModelShape, SamplingParams, Turn
from shoal.visibility import Visibility, VisibilityKind

MAX_CHILDREN: Final = 128


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One answer. `sampling` counts max_tokens and min_tokens from here on, after those replayed."""

    index: int
    replay_ids: tuple[int, ...]  # generated before, elsewhere; run as decode tokens, not streamed again
    sampling: SamplingParams  # stop_token_ids include EOS unless ignored

    @property
    def num_tokens(self) -> int:
        """Of the answer at its longest."""
        return len(self.replay_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, for those who want to end it. The id is the client's and need not be unique."""

    request_id: str = ""
    tenant: str = ""
    caller: str = ""  # the router's own id


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """What is asked of a decode worker. `layout` carries the resolved visibility, N, P and α."""

    attempt_id: str
    layout: KvLayout
    prompt_ids: tuple[int, ...]
    children: tuple[ChildSpec, ...]  # at least one; those that still run
    prompt_logprobs: int | None = None  # how many beside each prompt token after the first
    continuation_ids: tuple[int, ...] = ()  # to be scored; then nothing is sampled, and there is one child
    num_continuation_logprobs: int = 0
    disaggregation: DisaggregationRule = NEVER_LOCAL  # when its prefill tokens run here
    has_prefill_worker: bool = True  # False: they run here for want of one
    turn: Turn = USUAL_TURN
    origin: Origin = Origin()
    age_s: float = 0.0  # since the client asked, over all attempts
    cache_salt: str = ""  # whose cached prefixes it may use: `cache_key` of tenant and salt
    is_background: bool = False  # nobody waits for it: small pieces, and no prefix of it is kept
    images: tuple[ImageSpan, ...] = ()  # where images stand in the prompt; decode never needs their pixels

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_score(self) -> bool:
        return bool(self.continuation_ids)

    @property
    def scored_tokens(self) -> range:
        """Positions of the given tokens whose log-probabilities are asked for."""
        if self.is_score:
            return range(self.num_prompt_tokens, self.num_prompt_tokens + len(self.continuation_ids))
        return range(1, self.num_prompt_tokens) if self.prompt_logprobs is not None else range(0)

    @property
    def num_answer_tokens(self) -> list[int]:
        """Of each child at its longest."""
        return [len(self.continuation_ids)] if self.is_score else [child.num_tokens for child in self.children]


def read_spec(
    message: worker_pb2.DecodeRequest,
    attempt_id: str,
    config: WorkerConfig,
    shape: ModelShape,
    vision: VisionConfig | None = None,
) -> DecodeSpec:
    """Translate and check a request. Raises InvalidRequest with what to change, Unsupported for what is not offered."""
    prompt, continuation = tuple(message.prompt_ids), tuple(message.continuation_ids)
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    sampling = read_sampling(message.sampling, is_score=bool(continuation))
    children = _read_children(message, sampling)
    for child in children:
        check_token_ids(child.replay_ids, shape)
    check_token_ids(prompt + continuation + tuple(token_id for token_id, _ in sampling.logit_bias), shape)
    prompt_logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    spec = DecodeSpec(
        attempt_id,
        KvLayout.of(shape.num_layers, _visibility(message, config, shape), len(prompt)),
        prompt,
        children,
        prompt_logprobs,
        continuation,
        sampling.num_logprobs or 0,
        DisaggregationRule(message.local_prefill.below_tokens, message.local_prefill.cached_share or 1.0),
        not message.local_prefill.no_prefill_worker,
        Turn.parse(message.priority, message.tenant),
        Origin(message.request_id, message.tenant, message.caller),
        max(0.0, message.age_s),
        cache_key(message.tenant, message.cache_salt),
        message.background,
        spans_from_pb(message.images),
    )
    check_images(
        vision,
        prompt,
        spec.images,
        num_prefill_tokens=spec.layout.split.num_prefill_tokens,
        num_anchor_tokens=spec.layout.split.num_anchor_tokens,
        prefill_layers=len(spec.layout.lower_layers),
    )
    longest, limit = max(spec.num_answer_tokens), config.max_context(shape)
    if len(prompt) + longest > limit:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and an answer of up to {longest} (replayed tokens and max_tokens) exceed the context"
            f" of {limit}; lower max_tokens or shorten the prompt"
        )
    if prompt_logprobs is not None and (spec.layout.upper_layers or spec.layout.split.num_prefill_tokens):
        raise Unsupported(
            f"prompt_logprobs need the whole prompt run on decode, visibility full with boundary = {len(prompt)}; "
            f"asked for {message.visibility}"
        )
    return spec


def read_sampling(message: worker_pb2.Sampling, *, is_score: bool = False) -> SamplingParams:
    """Sampling parameters, resolved by the router: absent fields have been filled in. A score samples nothing."""
    if is_score:
        return SamplingParams(1, num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else 0)
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
        constraint=_read_constraint(message.constraint),
    )


def _read_constraint(message: worker_pb2.Constraint) -> Constraint | None:
    kind = message.WhichOneof("kind")
    return None if kind is None else Constraint(ConstraintKind(kind), getattr(message, kind))


def _read_children(message: worker_pb2.DecodeRequest, sampling: SamplingParams) -> tuple[ChildSpec, ...]:
    num_children = message.num_children or 1
    if num_children > MAX_CHILDREN:
        raise InvalidRequest(f"num_children must lie in 1…{MAX_CHILDREN}, not {num_children}")
    if message.continuation_ids and (num_children > 1 or message.replay_token_ids or message.child_replays):
        raise InvalidRequest("continuation_ids are scored alone: leave num_children, replay_token_ids and child_replays out")
    if not message.child_replays:
        if num_children > 1 and message.replay_token_ids:
            raise InvalidRequest("replay_token_ids are for one child; send child_replays for several")
        return tuple(ChildSpec(index, tuple(message.replay_token_ids), sampling) for index in range(num_children))
    indexes = [replay.index for replay in message.child_replays]
    if len(set(indexes)) != len(indexes) or max(indexes) >= num_children:
        raise InvalidRequest(f"child_replays must name distinct children below num_children = {num_children}")
    return tuple(
        ChildSpec(
            replay.index,
            tuple(replay.token_ids),
            replace(sampling, max_tokens=replay.max_tokens, min_tokens=replay.min_tokens),
        )
        for replay in message.child_replays
    )


def _visibility(message: worker_pb2.DecodeRequest, config: WorkerConfig, shape: ModelShape) -> Visibility:
    """Resolved and allowed. Prompt log-probabilities run the whole prompt here, whatever the boundary limit."""
    text, num_layers = message.visibility, shape.num_layers
    if message.HasField("prompt_logprobs"):
        wanted = Visibility.parse(text)
        if wanted.resolve(num_layers).kind is VisibilityKind.FULL and wanted.boundary_tokens == len(message.prompt_ids):
            config.accept_visibility(str(replace(wanted, boundary_tokens=1)), num_layers)
            return wanted.resolve(num_layers)
    return config.accept_visibility(text, num_layers)


def check_token_ids(token_ids: Sequence[int], shape: ModelShape) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    if token_ids and max(token_ids) >= shape.vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} lies outside the vocabulary of {shape.vocab_size}")
