"""What is asked of a decode worker, and whether it can be done at all. Knows limits; knows no load.

A worker checks for itself what the router has checked: it must not depend on who calls.
"""

from dataclasses import dataclass

from shoal.config.worker import WorkerConfig
from shoal.errors import InvalidRequest
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.tables import KvLayout
from shoal.types import ModelShape, SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """What is asked of a decode worker. `layout` carries the resolved visibility, N, P and α."""

    attempt_id: str
    layout: KvLayout
    prompt_ids: tuple[int, ...]
    replay_ids: tuple[int, ...]  # generated before, elsewhere; run as decode tokens, not streamed again
    sampling: SamplingParams  # max_tokens count from here on, after those replayed; stop_token_ids include EOS unless ignored

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)


def read_spec(message: worker_pb2.DecodeRequest, attempt_id: str, config: WorkerConfig, shape: ModelShape) -> DecodeSpec:
    """Translate and check a request. Raises InvalidRequest with what to change."""
    prompt, replay = tuple(message.prompt_ids), tuple(message.replay_token_ids)
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    check_token_ids(prompt + replay, shape)
    sampling = read_sampling(message.sampling)
    num_tokens, limit = len(prompt) + len(replay) + sampling.max_tokens, config.max_context(shape)
    if num_tokens > limit:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens, {len(replay)} replayed and max_tokens {sampling.max_tokens} exceed the context"
            f" of {limit}; lower max_tokens or shorten the prompt"
        )
    visibility = config.accept_visibility(message.visibility, shape.num_layers)
    layout = KvLayout.of(shape.num_layers, visibility, len(prompt))
    return DecodeSpec(attempt_id, layout, prompt, replay, sampling)


def read_sampling(message: worker_pb2.Sampling) -> SamplingParams:
    """Sampling parameters, resolved by the router: absent fields have been filled in."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def check_token_ids(token_ids: tuple[int, ...], shape: ModelShape) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    if token_ids and max(token_ids) >= shape.vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} lies outside the vocabulary of {shape.vocab_size}")
