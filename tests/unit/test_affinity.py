"""A router sends what begins alike to whom it sent it before, unless that one has more to do than this would save."""

import asyncio
import random
from dataclasses import replace

from shoal.placement.balance import WorkerLoadView, choose_worker
from shoal.router.affinity import PrefixMemory
from shoal.visibility import Visibility
from tests.fakes.cluster import Cluster, request
from tests.fakes.transfer import FINGERPRINT

FULL = Visibility.parse("full").resolve(FINGERPRINT.num_layers)


def views(**outstanding: int) -> list[WorkerLoadView]:
    return [WorkerLoadView(name, FINGERPRINT, frozenset({FULL.policy}), 8, work) for name, work in outstanding.items()]


def test_what_is_held_counts_as_work_that_need_not_be_done() -> None:
    rng = random.Random(0)
    a, b = views(a=1000, b=0)
    assert choose_worker([a, b], FULL, rng, pool="decode").worker_id == "b"
    assert choose_worker([replace(a, held_token_layers=1001), b], FULL, rng, pool="decode").worker_id == "a"
    assert choose_worker([replace(a, held_token_layers=999), b], FULL, rng, pool="decode").worker_id == "b"


def test_the_longest_run_from_the_beginning_counts_and_old_ones_are_forgotten() -> None:
    memory = PrefixMemory(capacity=4)
    chain = [bytes([index]) for index in range(4)]
    memory.sent(chain[:3], [("d0", 1), ("p0", 1)])
    memory.sent(chain[:1], [("d1", 1)])
    assert memory.held(chain) == {("d0", 1): 192, ("p0", 1): 192, ("d1", 1): 64}
    assert memory.held(chain[1:]) == {("d0", 1): 128, ("p0", 1): 128}  # as if it were another prompt: nothing is assumed
    memory.sent([b"x", b"y"], [("d0", 1)])
    assert memory.held(chain[2:]) == {} and memory.held(chain[:1])


async def test_requests_that_begin_alike_meet() -> None:
    async with Cluster(num_prefill=3, num_decode=3) as c:
        for start in range(6):
            ids = [start] * 200
            [first, *others] = [await c.complete(request(ids=[*ids, last], max_tokens=2)) for last in range(4)]
            places = {(done.transfer.prefill_worker, done.transfer.decode_worker) for done in others}
            assert places == {(first.transfer.prefill_worker, first.transfer.decode_worker)}
        alike = [request(ids=[9] * 200, max_tokens=200) for _ in range(9)]
        together = await asyncio.gather(*(c.complete(one) for one in alike))
        assert len({done.transfer.decode_worker for done in together}) > 1  # not all on one: it has more to do than they save
