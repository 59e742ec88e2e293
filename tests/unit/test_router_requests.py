"""What clients may ask for, and how many at once: bad input, ids, aborts, stop strings and text through the whole router."""

import asyncio
import math

import grpc
import pytest

from shoal.config.router import RouterConfig
from shoal.errors import InvalidConfig, Unavailable
from shoal.model_files import load_tokenizer, open_model
from shoal.pb.v1 import shoal_pb2
from shoal.router.app import Router
from shoal.router.token_queue import TokenQueue
from shoal.visibility import Visibility
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import until

CODE = grpc.StatusCode


def chat(*messages: tuple[str, str]) -> shoal_pb2.ChatInput:
    return shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(role=role, content=content) for role, content in messages])


BAD = [
    (shoal_pb2.GenerateRequest(), "has no input"),
    (request(text=""), "prompt is empty"),
    (request(ids=[]), "prompt is empty"),
    (shoal_pb2.GenerateRequest(tokenized=shoal_pb2.TokenizedInput()), "prompt is empty"),
    (request(chat=chat()), "prompt is empty"),
    (request(chat=chat(*[("assistant", "")] * 8192)), "at least 8192 tokens"),
    (request(chat=chat(("user", ""))), "chat message 0 is empty"),
    (request(chat=chat(("user", "hi"), ("pirate", "arr"))), "chat message 1 has role 'pirate'; use one of system"),
    (request(ids=[1, 49152]), r"input_ids\[1\] is 49152; .* 0…49151"),
    (request(ids=[5] * 8192), "the prompt has 8192 tokens; the context limit is 8192"),
    (request(text="a b" * 9000), "context limit is 8192"),
    (request(text="a" * (8192 * 256)), "at least 8192 tokens"),
    (request(max_tokens=8183), r"prompt \(10 tokens\) \+ max_tokens \(8183\) exceed .* 8192; set max_tokens to at most 8182"),
    (request(max_tokens=1 << 40), "exceed the context limit"),
    (request(max_tokens=0), "max_tokens must be at least 1"),
    (request(max_tokens=-3), "max_tokens must be at least 1, not -3"),
    (request(visibility="deep"), "unknown visibility 'deep'; accepted: full"),
    (request(visibility=""), "unknown visibility"),
    (request(visibility="speed"), "needs a prefill depth"),
    (request(visibility="speed:31"), "depth 31 exceeds the model's 30 layers"),
    (request(visibility="speed:0"), "needs a prefill depth K >= 1"),
    (request(visibility="speed:23"), "'speed:23' is not allowed here; allowed: full, speed:22, pop:20"),
    (request(visibility="speed:22:anchors=2"), "is not allowed here"),
    (request(visibility="pop:20:late"), "is not allowed here"),
    (request(visibility="full:boundary=65"), "boundary 65 exceeds the limit of 64"),
    (request(visibility="full:boundary=0"), "boundary must be 1 or more"),
    (request(temperature=-0.1), "temperature must be a finite number >= 0"),
    (request(temperature=math.nan), "temperature must be a finite number >= 0, not nan"),
    (request(temperature=math.inf), "temperature must be a finite"),
    (request(top_p=0.0), "top_p must lie in"),
    (request(top_p=1.5), "top_p must lie in"),
    (request(top_p=math.nan), "top_p must lie in"),
    (request(top_k=-1), "top_k must be 0"),
    (request(logprobs=-1), "logprobs must lie in 0…20"),
    (request(logprobs=21), "logprobs must lie in 0…20"),
    (request(stop=[""]), "stop strings must not be empty"),
    (request(stop=["x"] * 65), "sampling_params.stop has 65 entries; send at most 64"),
    (request(stop_token_ids=[49152]), r"stop_token_ids\[0\] is 49152"),
    (request(request_id="x" * 257), "request_id has 257 characters"),
    (request(stop=["x", "y" * 1025]), "sampling_params.stop has an entry of 1025 characters; send at most 1024"),
    (request(stop_token_ids=[5] * 1_000_000), "stop_token_ids has 1000000 entries; send at most 1024"),
    (request(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias has 1025 entries; send at most 1024"),
    (request(chat=shoal_pb2.ChatInput(tools_json=" " * (1 << 20) + "[]")), "chat.tools_json has 1048578 characters"),
    (request(chat=chat(("user", "hi"), ("pirate" * 100, "arr"))), r"chat.messages\[1\].role has 600 characters"),
    (shoal_pb2.GenerateRequest(text="a", model="m" * 257), "model has 257 characters"),
]


async def test_bad_input_is_refused_with_words_before_any_work() -> None:
    async with Cluster() as c:
        for bad, words in BAD:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await c.replies(bad)
            assert caught.value.code() is CODE.INVALID_ARGUMENT, bad
        assert not c.decode[0].seen and not c.prefill[0].seen
        assert list((await c.complete(request(max_tokens=1))).output_ids) == [100]  # and it serves on


async def test_absent_means_default_and_max_tokens_to_the_context_limit() -> None:
    async with Cluster(max_context=64) as c:
        done = await c.complete(request())
        [seen] = c.decode[0].seen
        assert done.completion_tokens == 54 == seen.sampling.max_tokens and done.finish_reason == "length"
        assert (seen.sampling.temperature, seen.sampling.top_p, seen.sampling.top_k) == (0.0, 1.0, 0)
        assert seen.sampling.seed == done.seed and not seen.sampling.HasField("num_logprobs")
        assert done.visibility == "full:boundary=1" and list(seen.sampling.stop_token_ids) == [2]
        again = await c.complete(request(max_tokens=1, ignore_eos=True, stop_token_ids=[9]))
        assert again.seed != done.seed and list(c.decode[0].seen[-1].sampling.stop_token_ids) == [9]
        assert (await c.status(request(ids=[1] * 64)))[0] is CODE.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("asked", "input_kind", "resolved"),
    [
        ("speed:22", "chat", "speed:22:boundary=4"),  # SmolLM2's generation prompt has 4 tokens
        ("speed:22:boundary=2", "chat", "speed:22:boundary=2"),
        ("speed:22", "text", "speed:22:boundary=1"),
        ("full", "chat", "full:boundary=1"),
        ("pop:20", "chat", "pop:20:boundary=1"),
        ("speed:30", "chat", "full:boundary=1"),  # K = L
        ("pop:30:boundary=7", "chat", "full:boundary=7"),
    ],
)
async def test_the_boundary_is_resolved_once_and_echoed(asked: str, input_kind: str, resolved: str) -> None:
    async with Cluster() as c:
        fields = {"chat": chat(("user", "Why do fish swim in shoals?"))} if input_kind == "chat" else {"text": "Why do fish"}
        done = await c.complete(request(visibility=asked, max_tokens=1, **fields))
        assert done.visibility == resolved == c.decode[0].seen[0].visibility == c.prefill[0].seen[0].visibility
        assert len(c.prefill[0].seen[0].prompt_ids) == done.prompt_tokens - (Visibility.parse(resolved).boundary_tokens or 0)


async def test_the_operators_first_is_the_default() -> None:
    async with Cluster(visibilities=("pop:20:boundary=3", "full")) as c:
        assert (await c.complete(request(max_tokens=1))).visibility == "pop:20:boundary=3"
        info = await c.stub.GetModelInfo(shoal_pb2.GetModelInfoRequest())
        assert list(info.allowed_visibilities) == ["pop:20", "full"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"visibilities": (Visibility.parse("speed:31"),)}, "exceeds the model's 30 layers"),
        ({"visibilities": (Visibility.parse("full:boundary=99"),)}, "boundary limit of 64"),
        ({"visibilities": (Visibility.parse("speed:22"),), "max_boundary_tokens": 3}, "raise it to 4"),
        ({"max_context": 9000}, "exceeds the model's own 8192"),
        ({"model": "nonesuch"}, "nonesuch"),
    ],
)
async def test_a_router_that_cannot_work_says_so_at_start(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Router(RouterConfig(**{"model": "smollm2-135m", "controller": "127.0.0.1:1", **settings}))  # type: ignore[arg-type]


def test_settings_are_checked() -> None:
    for settings, words in (
        ({}, "either a controller"),
        ({"controller": "a:1", "workers": ("decode=a:1",)}, "not both"),
        ({"controller": "a:1", "visibilities": ()}, "empty"),
        ({"controller": "a:1", "max_retries": -1}, "max_retries"),
        ({"controller": "a:1", "max_request_s": 0}, "max_request_s"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            RouterConfig(model="m", **settings)  # type: ignore[arg-type]


async def test_twenty_clients_with_one_id_each_get_their_own_answer() -> None:
    async with Cluster(2, 2) as c:
        for worker in c.decode:
            worker.delay_s = 0.002
        answers = await asyncio.gather(*(c.complete(request(ids=[7, 8], max_tokens=n, request_id="same")) for n in range(1, 21)))
        assert [a.completion_tokens for a in answers] == list(range(1, 21))


async def test_abort_ends_every_request_of_an_id_and_no_other() -> None:
    async with Cluster() as c:
        c.decode[0].delay_s = 0.01
        running = [asyncio.create_task(c.replies(request(request_id=i, stream=True))) for i in ("a", "a", "b")]
        await until(lambda: c.decode[0].num_sent > 9)
        reply = await c.stub.Abort(shoal_pb2.AbortRequest(request_ids=["a", "a", "unknown"]))
        assert reply.num_aborted == 2
        for task in running[:2]:
            *chunks, last = await asyncio.wait_for(task, 2)
            assert last.complete.finish_reason == "abort" and last.complete.completion_tokens > 0
            assert last.complete.text == "".join(r.chunk.text for r in chunks)
        assert not running[2].done()
        await until(lambda: c.decode[0].running == 1)  # both aborted legs have ended
        assert (await c.stub.Abort(shoal_pb2.AbortRequest(request_ids=["a"]))).num_aborted == 0
        await c.stub.Abort(shoal_pb2.AbortRequest(request_ids=["b"]))
        assert (await running[2])[-1].complete.finish_reason == "abort"


async def test_abort_before_the_first_token() -> None:
    async with Cluster() as c:
        c.prefill[0].hang = True
        task = asyncio.create_task(c.complete(request(request_id="a")))
        await c.prefill[0].busy()
        assert (await c.stub.Abort(shoal_pb2.AbortRequest(request_ids=["a"]))).num_aborted == 1
        done = await asyncio.wait_for(task, 2)
        assert (done.finish_reason, done.completion_tokens, done.text) == ("abort", 0, "")
        await c.prefill[0].idle()
        await c.decode[0].idle()


async def test_stop_strings_end_the_answer_and_decode() -> None:
    tokenizer = load_tokenizer(open_model("smollm2-135m"))
    async with Cluster() as c:
        c.decode[0].script = tokenizer.encode("Fish swim in shoals. They turn together, always.")
        done = await c.complete(request(stop=["turn to", "zebra"]))
        *chunks, last = await c.replies(request(stop=["turn to", "zebra"], stream=True))
        assert done.text == last.complete.text == "".join(r.chunk.text for r in chunks) == "Fish swim in shoals. They "
        assert done.finish_reason == "stop" and done.matched_stop_str == "turn to"
        assert list(done.output_ids) == [i for r in chunks for i in r.chunk.token_ids]
        assert tokenizer.decode(done.output_ids).endswith("turn together")  # the token that completed it, and none after
        assert done.transfer.payload_bytes == done.transfer.plan_bytes > 0 and done.timings.prefill_ms == 3
        assert done.decode_kv.layer_tokens == (9 + done.completion_tokens) * 30
        await c.decode[0].idle()
        # the prompt's own tail is no match, not even in part
        c.decode[0].script = tokenizer.encode("n on.")
        prompt = request(ids=tokenizer.encode("a long tur"), stop=["turn on"], max_tokens=3)
        assert (await c.complete(prompt)).finish_reason == "length"


async def test_characters_split_over_tokens_and_messages_come_whole() -> None:
    tokenizer = load_tokenizer(open_model("smollm2-135m"))
    text = "日本語 👩‍👩‍👧 ok"
    async with Cluster(flush_s=0.0, flush_tokens=1) as c:
        c.decode[0].script = [*tokenizer.encode(text), 2]
        *chunks, last = await c.replies(request(stream=True))
        texts = [r.chunk.text for r in chunks]
        assert len(texts) > 5 and "\ufffd" not in "".join(texts)
        assert "".join(texts) == last.complete.text == text and last.complete.matched_token_id == 2


async def test_the_first_token_comes_at_once_and_later_ones_are_gathered() -> None:
    async with Cluster(flush_s=30.0, flush_tokens=16, max_queued_tokens=64) as c:
        c.decode[0].delay_s = 0.001
        *chunks, _ = await asyncio.wait_for(c.replies(request(stream=True, max_tokens=50)), 10)
        assert [len(r.chunk.token_ids) for r in chunks] == [1, 16, 16, 16, 1]


async def test_a_full_queue_stops_its_producer_and_delivers_in_order() -> None:
    queue: TokenQueue[int] = TokenQueue(8)
    put = 0

    async def produce() -> None:
        nonlocal put
        for number in range(100):
            await queue.put(number)
            put += 1
        queue.end(Unavailable("gone"))

    producer = asyncio.create_task(produce())
    await asyncio.sleep(0.02)
    assert put == 8  # the reader has taken nothing
    taken = await queue.take(3, 0.0)
    await asyncio.sleep(0.02)
    assert (taken, put) == ([0, 1, 2], 11)
    while len(taken) < 100:
        taken += await queue.take(16, 0.0)
    assert taken == list(range(100))
    with pytest.raises(Unavailable, match="gone"):
        await queue.take(16, 0.0)
    await producer


async def test_an_end_now_leaves_no_gap_behind_what_it_drops() -> None:
    queue: TokenQueue[int] = TokenQueue(8)
    await queue.put(0)
    assert await queue.take(8, 0.0) == [0]
    await queue.put(1)
    queue.end_now(Unavailable("aborted"))
    await queue.put(2)  # the producer has not heard of it yet
    with pytest.raises(Unavailable, match="aborted"):
        await queue.take(8, 0.0)


async def test_a_reader_that_does_not_read_holds_up_nobody_else() -> None:
    async with Cluster(flush_s=0.0, flush_tokens=1, max_queued_tokens=8) as c:
        slow = c.stub.Generate(request(stream=True))
        await slow.read()
        assert (await asyncio.wait_for(c.complete(request(max_tokens=20)), 5)).completion_tokens == 20
        slow.cancel()
        await c.decode[0].idle()


async def test_a_request_without_a_deadline_gets_the_operators() -> None:
    async with Cluster(max_request_s=0.3) as c:
        c.decode[0].hang = True
        code, words = await asyncio.wait_for(c.status(request()), 3)
        assert code is CODE.DEADLINE_EXCEEDED, words
        await c.decode[0].idle()
