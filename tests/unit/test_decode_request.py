import asyncio
import dataclasses

import pytest

from shoal.config.worker import Pool, WorkerConfig
from shoal.decode_worker.output import Finish, OutputStream, OutputToken
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.spec import ChildSpec, DecodeSpec, read_spec
from shoal.errors import InternalError, InvalidRequest, Unavailable, Unsupported
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.tables import KvLayout
from shoal.types import FinishReason, ModelShape, SamplingParams
from shoal.visibility import Visibility

SHAPE = ModelShape(4, 64, 4, 2, 16, 128, 256, 64)
CONFIG = WorkerConfig("d0", Pool.DECODE, "tiny", allowed_visibilities=(Visibility.parse("speed:2"),))


def request(max_tokens: int = 3) -> DecodeRequest:
    layout = KvLayout.of(4, Visibility.parse("speed:2:boundary=2"), 10)
    ticks = iter(range(100))
    child = ChildSpec(0, (7,), SamplingParams(max_tokens))
    return DecodeRequest(DecodeSpec("a", layout, tuple(range(10)), (child,)), clock=lambda: float(next(ticks)))


async def test_states_follow_the_picture_and_are_timed() -> None:
    life = request()
    for state in ("reserved", "receiving", "ready", "running", "finished"):
        life.move(RequestState(state))
    assert [life.times[state] for state in RequestState if state in life.times] == [0, 1, 2, 3, 4, 5]
    assert life.ms_since_reserved(life.times[RequestState.READY]) == 2000
    with pytest.raises(InternalError):
        life.move(RequestState.CANCELLED)
    skipping = request()
    with pytest.raises(InternalError, match="queued to ready"):
        skipping.move(RequestState.READY)
    skipping.move(RequestState.CANCELLED)


async def test_outstanding_work_falls_to_nothing() -> None:
    life = request(max_tokens=3)
    work = [life.num_outstanding_token_layers]
    for token in (1, 2, 3):
        life.children[0].take(token)
        life.noted_token()
        work.append(life.num_outstanding_token_layers)
    assert work == [(2 + 1 + 2) * 4, 2 * 4, 1 * 4, 0]


async def test_a_slow_reader_gets_everything_in_one_piece() -> None:
    output = OutputStream()
    for token in range(5):
        output.put(OutputToken(token, None))
    batches = output.batches()
    assert [token.token_id for token in await anext(batches)] == [0, 1, 2, 3, 4]
    output.put(OutputToken(5, None))
    output.end(Finish(FinishReason.LENGTH))
    output.end(Unavailable("too late to count"))
    assert [[token.token_id for token in batch] async for batch in batches] == [[5]]
    assert output.finish == Finish(FinishReason.LENGTH)


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    output = OutputStream()
    reader = asyncio.create_task(anext(output.batches()))
    await asyncio.sleep(0)
    output.put(OutputToken(1, None))
    assert [token.token_id for token in await reader] == [1]
    output.put(OutputToken(2, None))
    output.end(Unavailable("the pair is gone"))
    seen: list[int] = []
    with pytest.raises(Unavailable, match="the pair is gone"):
        async for batch in output.batches():
            seen += [token.token_id for token in batch]
    assert seen == [2]


def message(**changes: object) -> worker_pb2.DecodeRequest:
    sampling = worker_pb2.Sampling(max_tokens=4, top_p=1.0)
    fields = {"prompt_ids": [1, 2, 3], "visibility": "speed:2:boundary=1", "sampling": sampling} | changes
    return worker_pb2.DecodeRequest(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [256]}, "vocabulary"),
        ({"replay_token_ids": [256]}, "vocabulary"),
        ({"prompt_ids": [1] * 61}, "exceed the context of 64"),
        ({"visibility": "full:boundary=1"}, "not allowed"),
        ({"visibility": "speed:2"}, "not resolved"),
        ({"sampling": worker_pb2.Sampling(top_p=1.0)}, "max_tokens"),
        ({"sampling": worker_pb2.Sampling(max_tokens=1, top_p=1.0, temperature=float("nan"))}, "temperature"),
    ],
)
def test_bad_requests_are_refused_with_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_spec(message(**changes), "a", CONFIG, SHAPE)


def test_a_good_request_is_read() -> None:
    spec = read_spec(message(replay_token_ids=[9]), "a", CONFIG, SHAPE)
    [child] = spec.children
    assert spec.prompt_ids == (1, 2, 3) and child.replay_ids == (9,) and child.sampling.num_logprobs is None
    assert spec.layout.split.num_prefill_tokens == 2


CHILDREN = [worker_pb2.ChildReplay(index=i, token_ids=[5] * i, max_tokens=4 - i, min_tokens=1) for i in (0, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_children": 129}, r"num_children must lie in 1…128"),
        ({"num_children": 2, "replay_token_ids": [1]}, "send child_replays"),
        ({"num_children": 2, "child_replays": CHILDREN}, "distinct children below num_children = 2"),
        ({"num_children": 3, "child_replays": [CHILDREN[0], CHILDREN[0]]}, "distinct children"),
        ({"num_children": 3, "child_replays": [worker_pb2.ChildReplay(token_ids=[256], max_tokens=1)]}, "vocabulary"),
        ({"num_children": 3, "child_replays": [worker_pb2.ChildReplay(token_ids=[1] * 61, max_tokens=1)]}, "context of 64"),
        ({"num_children": 3, "child_replays": [worker_pb2.ChildReplay(index=1)]}, "max_tokens must be at least 1"),
        ({"continuation_ids": [1], "num_children": 2}, "are scored alone"),
        ({"continuation_ids": [256]}, "vocabulary"),
        ({"continuation_ids": [1] * 62}, "exceed the context of 64"),
        ({"sampling": worker_pb2.Sampling(max_tokens=4, top_p=1.0, logit_bias={256: 1.0})}, "vocabulary"),
        ({"sampling": worker_pb2.Sampling(max_tokens=4, top_p=1.0, min_tokens=5)}, "min_tokens"),
    ],
)
def test_bad_children_and_continuations_are_refused_with_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_spec(message(**changes), "a", CONFIG, SHAPE)


def test_prompt_logprobs_need_the_whole_prompt_on_decode_at_full_depth() -> None:
    config = dataclasses.replace(CONFIG, allowed_visibilities=(Visibility(), *CONFIG.allowed_visibilities), max_boundary_tokens=2)
    spec = read_spec(message(prompt_logprobs=1, visibility="full:boundary=3"), "a", config, SHAPE)  # beyond the boundary limit
    assert spec.layout.split.num_prefill_tokens == 0 and spec.scored_tokens == range(1, 3)
    for visibility in ("full:boundary=2", "speed:2:boundary=1"):
        with pytest.raises(Unsupported, match="prompt_logprobs need the whole prompt run on decode"):
            read_spec(message(prompt_logprobs=1, visibility=visibility), "a", config, SHAPE)
    with pytest.raises(InvalidRequest, match="boundary exceeds the limit"):
        read_spec(message(visibility="full:boundary=3"), "a", config, SHAPE)
    with pytest.raises(InvalidRequest, match="not allowed"):
        read_spec(message(prompt_logprobs=1, visibility="full:boundary=3"), "a", CONFIG, SHAPE)


def test_resumed_children_count_on_from_where_they_were() -> None:
    spec = read_spec(message(num_children=3, child_replays=CHILDREN), "a", CONFIG, SHAPE)
    assert [(child.index, child.replay_ids, child.sampling.max_tokens) for child in spec.children] == [(0, (), 4), (2, (5, 5), 2)]
    assert spec.num_answer_tokens == [4, 4] and spec.scored_tokens == range(0)
    whole = read_spec(message(num_children=3), "a", CONFIG, SHAPE)
    assert [child.index for child in whole.children] == [0, 1, 2]


async def test_outstanding_work_of_children_and_scores() -> None:
    life = DecodeRequest(read_spec(message(num_children=3, child_replays=CHILDREN), "a", CONFIG, SHAPE))
    assert life.num_outstanding_token_layers == (1 + 3 + 3) * 4
    scoring = DecodeRequest(read_spec(message(continuation_ids=[1, 2, 3]), "a", CONFIG, SHAPE))
    assert scoring.num_outstanding_token_layers == (1 + 2) * 4
    assert scoring.token_ids(scoring.children[0], 1, 5) == (2, 3, 1, 2)
