"""The continuous batch: answers depend on neither chunks nor neighbours, blocks add up, work does not grow with the batch."""

import random

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.local import LocalEngine, LocalRequest
from shoal.errors import AlreadyExists, InvalidRequest
from shoal.types import FinishReason
from tests import engine_support as support

VISIBILITIES = [
    "full",
    "full:boundary=4",
    "speed:2",
    "speed:3:anchors=4:boundary=2",
    "speed:1:anchors=0",
    "pop:2",
    "pop:3:late",
    "pop:1:late:boundary=3",
]
MIXED = ["llama", "mistral-window", "qwen2-bias-mixed-windows"]


def requests(max_tokens: int = 6, **sampling: object) -> list[LocalRequest]:
    lengths = [17, 1, 9, 30, 2, 12, 23, 5]
    return [
        support.greedy(support.prompt(length, index), visibility, max_tokens + index % 3, seed=index, **sampling)
        for index, (length, visibility) in enumerate(zip(lengths, VISIBILITIES, strict=True))
    ]


@pytest.mark.parametrize("variant", MIXED)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "random"])
def test_batched_equals_alone_and_chunked_equals_whole(variant: str, sampling: dict[str, object]) -> None:
    decoder, all_requests = support.decoder(variant), requests(**sampling)
    alone = [support.engine(decoder).generate([request])[0] for request in all_requests]
    for options in [{}, {"token_budget": 7}, {"token_budget": 1}, {"token_budget": 16, "max_step_requests": 3}]:
        together = support.engine(decoder, **options).generate(all_requests)
        for result, expected in zip(together, alone, strict=True):
            support.assert_close(result, expected)


def test_requests_join_and_leave_every_step() -> None:
    decoder, all_requests = support.decoder(), requests()
    expected = [support.engine(decoder).generate([request])[0] for request in all_requests]
    engine, answers, sizes = support.engine(decoder, token_budget=12), {}, set()
    for index, request in enumerate(all_requests):
        engine.submit(str(index), request)
        for token in engine.step():
            answers.setdefault(token.key, []).append(token.token_id)
        sizes.add(engine.blocks.num_used)
    while not engine.is_idle:
        for token in engine.step():
            answers.setdefault(token.key, []).append(token.token_id)
    assert [tuple(answers[str(i)]) for i in range(8)] == [result.token_ids for result in expected]
    assert len(sizes) > 4 and engine.blocks.num_used == 0


def test_waits_for_blocks_in_order_of_arrival() -> None:
    decoder = support.decoder()
    engine = support.engine(decoder, num_blocks=48)  # 4 layers × 12 blocks of 4 slots: two of the requests below
    order = []
    for index in range(6):
        engine.submit(str(index), support.greedy(support.prompt(15, index), "full", 6))
    while not engine.is_idle:
        order += [token.key for token in engine.step() if token.finish_reason]
        engine.blocks.check()
    assert order == [str(index) for index in range(6)]


@pytest.mark.parametrize("variant", MIXED)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "random"])
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_replay_resumes_an_answer(variant: str, visibility: str, sampling: dict[str, object]) -> None:
    engine = support.engine(support.decoder(variant))
    ids = support.prompt(13)
    [whole] = engine.generate([support.greedy(ids, visibility, 8, **sampling)])
    for cut in (1, 5, 7):
        [rest] = engine.generate([support.greedy(ids, visibility, 8 - cut, whole.token_ids[:cut], **sampling)])
        assert rest.token_ids == whole.token_ids[cut:]
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(rest.logprobs, whole.logprobs[cut:], strict=True))


def test_children_of_one_request_differ_and_repeat() -> None:
    ids = support.prompt(9)
    base = support.greedy(ids, "speed:2", 6, temperature=1.5, seed=3)
    children = [LocalRequest(base.prompt_ids, base.visibility, base.sampling, child=child) for child in (0, 1, 2)]
    engine = support.engine(support.decoder())
    first = [result.token_ids for result in engine.generate(children)]
    assert len(set(first)) == 3 and first == [result.token_ids for result in engine.generate(children)]


def test_stop_ids_and_eos() -> None:
    engine = support.engine(support.decoder())
    ids = support.prompt(9)
    [free] = engine.generate([support.greedy(ids, "full", 6)])
    assert free.finish_reason is FinishReason.LENGTH and len(free.token_ids) == 6
    third = free.token_ids[2]
    [stopped] = engine.generate([support.greedy(ids, "full", 6, stop_token_ids=(third,))])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    [eos] = support.decoder().config.eos_token_ids
    for ignore, reason in [(False, FinishReason.STOP), (True, FinishReason.LENGTH)]:
        flood = support.greedy(ids, "full", 120, temperature=50.0, ignore_eos=ignore, seed=1)
        [result] = support.engine(support.decoder(), num_blocks=400).generate([flood])
        assert (eos in result.token_ids) and result.finish_reason is reason
        assert ignore or (result.token_ids[-1] == eos and eos not in result.token_ids[:-1])


def test_impossible_requests_are_refused_before_any_work() -> None:
    engine = support.engine(support.decoder(), num_blocks=80)
    for bad, words in [
        (support.greedy([], "full"), "the prompt is empty"),
        (support.greedy([5, 300], "full"), "must lie in 0…299"),
        (support.greedy([5, -1], "full"), "must lie in 0…299"),
        (support.greedy([5], "full", replay=[300]), "must lie in 0…299"),
        (support.greedy([5], "speed:5"), "exceeds the model's 4 layers"),
        (support.greedy([5] * 500, "full", 13), "exceed the context of 512"),
        (support.greedy([5] * 78, "full", 4), "KV blocks"),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            engine.submit("a", bad)
    assert engine.is_idle and engine.blocks.num_used == 0
    engine.submit("a", support.greedy([5] * 77, "full", 4))  # the largest that fits
    with pytest.raises(AlreadyExists):
        engine.submit("a", support.greedy([5], "full"))
    assert engine.run()["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(4))
def test_blocks_add_up_under_random_submissions_and_cancels(seed: int) -> None:
    rng = random.Random(seed)
    engine = support.engine(support.decoder("mistral-window"), num_blocks=160, token_budget=10)
    live: list[str] = []
    num_finished = num_cancelled = 0
    for turn in range(120):
        if rng.random() < 0.4:
            key = f"r{turn}"
            ids = support.prompt(rng.randint(1, 25), turn)
            engine.submit(key, support.greedy(ids, rng.choice(VISIBILITIES), rng.randint(1, 6)))
            live.append(key)
        if live and rng.random() < 0.15:
            victim = rng.choice(live)
            engine.cancel(victim)
            engine.cancel(victim)  # harmless when repeated
            live.remove(victim)
            num_cancelled += 1
        for token in engine.step():
            assert token.key in live
            if token.finish_reason is not None:
                live.remove(token.key)
                num_finished += 1
        engine.blocks.check()
        assert engine.blocks.num_free + engine.blocks.num_used == 160
    assert num_finished > 10 and num_cancelled > 3
    results = engine.run()
    assert set(results) <= set(live) and engine.is_idle
    assert engine.blocks.num_used == 0
    engine.cancel("never seen")


def test_linear_calls_per_step_do_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all run their decode rows, a step of 8 requests of 8 visibilities multiplies as often as a step of 1."""
    calls: list[int] = []
    plain = F.linear

    def counted(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return plain(x, *rest)

    monkeypatch.setattr(F, "linear", counted)
    num_layers = support.decoder(backend="torch").config.shape.num_layers

    def decode_steps(engine: LocalEngine, some: list[LocalRequest]) -> list[list[int]]:
        for index, request in enumerate(some):
            engine.submit(str(index), request)
        while len(engine.step()) < len(some):  # until every request decodes in every step
            pass
        steps = []
        for _ in range(3):
            calls.clear()
            assert len(engine.step()) == len(some)
            steps.append(list(calls))
        return steps

    one = decode_steps(support.engine(support.decoder(backend="torch")), requests(20)[3:4])
    eight = decode_steps(support.engine(support.decoder(backend="torch")), requests(20))
    assert {len(step) for step in one + eight} == {4 * num_layers + 1}
    assert {rows for step in one for rows in step} == {1} and {rows for step in eight for rows in step} == {8}


def test_linear_calls_of_prefill_do_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill step of many requests: at most one qkv, output, gate-up and down call per layer, and one for K/V-only rows."""
    calls: list[tuple[int, ...]] = []
    plain = F.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        calls.append(tuple(weight.shape))
        return plain(x, weight, *rest)

    monkeypatch.setattr(F, "linear", counted)
    num_layers = support.decoder(backend="torch").config.shape.num_layers
    engine = support.engine(support.decoder(backend="torch"))
    for copy in range(2):
        for index, request in enumerate(requests()):
            engine.submit(f"{copy}-{index}", request)
    engine.step()
    assert 0 < len(calls) <= 5 * num_layers + 1


def test_a_refused_request_leaves_none_of_its_batch_queued() -> None:
    engine, good = support.engine(support.decoder()), support.greedy(support.prompt(5), "full", 2)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.generate([good, support.greedy((), "full", 2)])
    assert engine.is_idle
    assert len(engine.generate([good])[0].token_ids) == 2
