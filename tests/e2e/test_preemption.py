"""Requests that give their blocks up to others, and go on later: every token once, and everyone gets to the end."""

import asyncio
import random
from pathlib import Path

import pytest

from shoal.engine.local import LocalRequest
from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.types import SamplingParams
from shoal.visibility import Visibility
from tests.e2e.served import Served, ask, local, served

KINDS = ("full", "speed:2", "speed:3:anchors=4", "pop:2", "pop:1:late")
TWO = 4 * (2 * 9 + 2)  # blocks of 8 tokens: two requests at their longest, and a little


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


async def streamed(s: Served, request: shoal_pb2.GenerateRequest) -> tuple[list[list[int]], list[shoal_pb2.GenerateComplete]]:
    """Each child's tokens as they were streamed, and its last message."""
    tokens: dict[int, list[int]] = {}
    completes = {}
    for reply in await s.replies(request):
        if reply.HasField("chunk"):
            tokens.setdefault(reply.chunk.index, []).extend(reply.chunk.token_ids)
        else:
            completes[reply.complete.index] = reply.complete
    return [tokens[index] for index in sorted(tokens)], [completes[index] for index in sorted(completes)]


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_pool_of_two_and_thirty_two_in_line(model: Path, prefix_cache: bool) -> None:
    rng = random.Random(prefix_cache)
    requests, expected = [], []
    for index in range(32):
        prompt = tuple(rng.randrange(512) for _ in range(rng.choice([3, 9, 20])))
        kind, num_tokens, num_children = KINDS[index % 5], rng.choice([6, 30, 48]), 2 if index % 8 == 3 else 1
        temperature = 0.7 if index % 2 else 0.0
        requests.append(
            ask(prompt, kind, stream=True, max_tokens=num_tokens, n=num_children, seed=index, temperature=temperature)
        )
        sampling = SamplingParams(num_tokens, temperature=temperature, seed=index, ignore_eos=True)
        expected += LocalRequest(prompt, Visibility.parse(kind), sampling).children(num_children)
    workers = {"preemption": True, "prefix_cache": prefix_cache, "num_blocks": TWO, "max_running_requests": 8}
    async with served(model, decode=[workers]) as s:
        answers = await asyncio.wait_for(asyncio.gather(*(streamed(s, request) for request in requests)), 90)
    results = [list(result.token_ids) for result in local(model, expected)]
    assert [tokens for streams, _ in answers for tokens in streams] == results
    assert [list(done.output_ids) for _, completes in answers for done in completes] == results
    finals = [done for _, completes in answers for done in completes]
    assert sum(done.num_preemptions for done in finals) > 0, [done.num_preemptions for done in finals]
    assert all(done.num_retries == 0 for done in finals)


async def test_more_run_at_once_than_their_longest_answers_would_let_in(model: Path) -> None:
    """A request whose limit is far away takes what its tokens take."""
    prompts = [tuple(range(start, start + 9)) for start in range(0, 80, 10)]
    far = [ask(prompt, max_tokens=40, stop_token_ids=list(range(256))) for prompt in prompts]
    peaks = []
    for preemption in (False, True):
        async with served(model, decode=[{"preemption": preemption, "num_blocks": TWO}]) as s:
            running = [asyncio.ensure_future(s.completes(request)) for request in far]
            peak = 0
            while not all(task.done() for task in running):
                peak = max(peak, s.decode[0].load().num_reservations)
                await asyncio.sleep(0.001)
            await asyncio.gather(*running)
        peaks.append(peak)
    assert peaks[0] <= 3 < peaks[1], peaks


async def test_callers_leave_while_others_give_way(model: Path) -> None:
    rng = random.Random(1)
    workers = {"preemption": True, "num_blocks": TWO, "max_running_requests": 6}
    async with served(model, decode=[workers]) as s:

        async def live(index: int) -> None:
            running = asyncio.ensure_future(s.completes(ask(tuple(range(index, index + 12)), KINDS[index % 5], max_tokens=40)))
            await asyncio.wait((running,), timeout=rng.choice([0.02, 0.1, 0.3, 60]))
            running.cancel()
            await asyncio.wait((running,))

        await asyncio.wait_for(asyncio.gather(*(live(index) for index in range(24))), 60)
        await s.all_free()
        [last] = await s.completes(ask(range(7, 19), max_tokens=40))
        assert len(last.output_ids) == 40
