"""What one stream may hold and how long it may take, at the router, with workers that never tire."""

import asyncio

import grpc

from shoal.pb.v1 import shoal_pb2_grpc
from shoal.router import instruments
from tests.fakes.cluster import Cluster, request

CODE = grpc.StatusCode


def fetched() -> int:
    """Tokens that routers of this process have taken from decode."""
    return int(instruments.GENERATED_TOKENS._value.get())


async def test_a_stream_that_is_not_read_stops_its_own_request_and_then_goes_on() -> None:
    """What the reader leaves lying fills the router's queue and the connection's window; then decode's tokens are not fetched."""
    window = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))
    async with (
        Cluster(flush_s=0.0, flush_tokens=1, max_queued_tokens=8) as c,
        grpc.aio.insecure_channel(c.address, options=window) as channel,
    ):
        num_tokens, start = 8_000, fetched()
        slow = shoal_pb2_grpc.ShoalStub(channel).Generate(request(stream=True, max_tokens=num_tokens, request_id="x" * 256))
        replies = aiter(slow)
        ids = list((await anext(replies)).chunk.token_ids)
        before = -1
        while before != fetched() - start:
            before = fetched() - start
            await asyncio.sleep(0.3)
        assert 8 < before < num_tokens - 1_000
        for _ in range(3):  # others are served meanwhile
            assert (await asyncio.wait_for(c.complete(request(max_tokens=20)), 5)).completion_tokens == 20
        assert fetched() - start == before + 60  # of the slow one, nothing more
        async for reply in replies:
            ids += reply.chunk.token_ids
        assert len(ids) == num_tokens and list(reply.complete.output_ids) == ids
        assert len(set(ids[0::8])) == 1  # in order: the script repeats every eight


async def test_tokens_wait_for_others_no_longer_than_the_flush_time() -> None:
    async with Cluster(flush_s=0.02, flush_tokens=10_000, max_queued_tokens=10_000) as c:
        c.decode[0].delay_s = 0.004
        sizes = []
        async for reply in c.stub.Generate(request(stream=True, max_tokens=60)):
            sizes.append(len(reply.chunk.token_ids))
        *sizes, _ = sizes
        assert sizes[0] == 1 and sum(sizes) == 60
        assert 4 <= len(sizes) < 60 and max(sizes) > 1  # gathered, and not all of them kept to the end


async def test_a_client_may_not_ask_for_more_time_than_the_operator_gives() -> None:
    async with Cluster(max_request_s=0.3) as c:
        c.decode[0].hang = True
        code, words = await asyncio.wait_for(c.status(request(), timeout=60), 5)
        assert code is CODE.DEADLINE_EXCEEDED, words
        await c.decode[0].idle()
        c.decode[0].hang, c.prefill[0].hang = False, True
        code, _ = await asyncio.wait_for(c.status(request(), timeout=0.1), 5)  # less is the client's own choice
        assert code is CODE.DEADLINE_EXCEEDED
        await c.prefill[0].idle()


async def test_one_id_twenty_times_at_once_and_every_answer_names_it() -> None:
    async with Cluster(2, 2) as c:
        replies = await asyncio.gather(*(c.replies(request(max_tokens=n, request_id="same", stream=True)) for n in range(1, 21)))
        for num_tokens, own in enumerate(replies, start=1):
            assert {reply.request_id for reply in own} == {"same"} and own[-1].complete.completion_tokens == num_tokens
        seen = [message.request_id for worker in c.decode for message in worker.seen]
        attempts = [message.attempt_id for worker in c.prefill for message in worker.seen]
        assert seen == ["same"] * 20 and len(set(attempts)) == 20  # echoed outside, unique inside
        drawn = {(await c.replies(request(max_tokens=1)))[0].request_id for _ in range(3)}
        assert len(drawn) == 3 and "" not in drawn
