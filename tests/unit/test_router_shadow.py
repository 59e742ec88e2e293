"""Replays as the router issues them: which requests, how little they ask of others, what becomes of each. Scripted workers."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.commands import RouterPlace, router_arguments
from shoal.config.router import RouterConfig
from shoal.config.serve import ServeConfig
from shoal.config.shadow import ShadowConfig
from shoal.config.tokens import TokenEntry, hash_token
from shoal.errors import InvalidConfig, InvalidRequest, Unavailable
from shoal.pb.v1 import shoal_pb2
from shoal.router import instruments
from shoal.router.app import Router
from shoal.router.main import command
from shoal.router.shadow import MAX_ANSWER_TOKENS, MAX_HELD
from shoal.visibility import Visibility
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import FakeWorker, until

SHADOW = ShadowConfig(rate=1.0, min_agreement=0.5, min_samples=1, window=1, cool_down_s=0.0)
ROOM = {"num_total_blocks": 100_000, "max_reservations": 64}  # as an idle worker reports
POLICY = "speed:22"


def outcomes() -> dict[str, float]:
    samples = [sample for family in instruments.SHADOWED.collect() for sample in family.samples if sample.name.endswith("_total")]
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.labels["visibility"] == POLICY}


async def told(outcome: str, before: dict[str, float]) -> None:
    """Wait until one more had this outcome, and none another."""
    await until(lambda: outcomes() != before, timeout_s=10)
    assert {name: n - before.get(name, 0) for name, n in outcomes().items() if n != before.get(name, 0)} == {outcome: 1}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with started() as c:
        yield c


def started(**settings: Any) -> Cluster:
    made = Cluster(1, 1, **({"shadow": SHADOW, "load_interval_s": 0.02, "max_retries": 2} | settings))
    made.decode[0].report = dict(ROOM)
    return made


def load(cluster: Cluster, worker: FakeWorker, name: str) -> Any:
    """What the router has heard of a worker."""
    [known] = [known for known in cluster.router.registry.workers if known.worker_id == worker.worker_id]
    return getattr(known.load, name)


async def test_a_replay_is_two_scores_in_the_lowest_class_that_leave_nothing(cluster: Cluster) -> None:
    before, decode = outcomes(), cluster.decode[0]
    prefilled = instruments.PREFILLS.labels("prefill_worker", "long")._value.get()
    done = await cluster.complete(
        request(max_tokens=5, visibility=POLICY, cache_salt="pepper", priority="high", request_id="mine", temperature=1.0)
    )
    await told("measured", before)
    own, deep, shallow = decode.seen
    assert (own.request_id, own.background, list(own.continuation_ids)) == ("mine", False, [])
    assert [replay.visibility for replay in (deep, shallow)] == ["full:boundary=1", done.visibility]
    for replay in (deep, shallow):
        assert (list(replay.prompt_ids), list(replay.continuation_ids)) == (list(own.prompt_ids), list(done.output_ids))
        assert (replay.priority, replay.cache_salt, replay.sampling.num_logprobs) == ("low", "pepper", 20)
        assert replay.background and replay.request_id.startswith("shadow-") and replay.num_children <= 1
    assert [task.background for task in cluster.prefill[0].seen] == [False, True, True]
    assert instruments.PREFILLS.labels("prefill_worker", "long")._value.get() == prefilled + 1  # the client's alone
    [quality] = [q for q in cluster.router.service.server_info().quality if q.visibility == POLICY]
    assert (quality.state, quality.num_samples, quality.num_tokens, quality.agreement) == ("served", 1, 5, 1.0)
    assert instruments.SHADOW_HELD._value.get() == 0


async def test_a_replay_belongs_to_the_tenant_and_counts_for_none_of_its_limits(tmp_path: Path) -> None:
    entry = TokenEntry("acme", hash_token("t0ken"), max_concurrent=1, requests_per_minute=2)
    (tmp_path / "tokens.yaml").write_text(entry.to_yaml())
    async with started(tokens_file=str(tmp_path / "tokens.yaml")) as c:
        before, header = outcomes(), (("authorization", "Bearer t0ken"),)
        await c.complete(request(max_tokens=2, visibility=POLICY), metadata=header)
        await told("measured", before)
        await c.complete(request(max_tokens=2), metadata=header)
        assert [seen.tenant for seen in c.decode[0].seen] == ["acme"] * 4


async def test_what_lends_itself_to_no_replay_is_not_chosen(cluster: Cluster) -> None:
    before, decode = outcomes(), cluster.decode[0]
    await cluster.complete(request(max_tokens=3))  # full
    await cluster.complete(request([7], max_tokens=3, visibility=POLICY))  # no prefill tokens
    await cluster.complete(request([7, 8, 9], max_tokens=3, visibility=f"{POLICY}:boundary=2"))  # all of them are anchors
    decode.delay_s = 0.05
    running = asyncio.create_task(cluster.complete(request(max_tokens=500, visibility=POLICY, request_id="x")))
    await until(lambda: decode.num_sent > 11)
    await cluster.stub.Abort(shoal_pb2.AbortRequest(request_ids=["x"]))
    assert (await running).finish_reason == "abort"
    left = cluster.stub.Generate(request(max_tokens=500, visibility=POLICY, stream=True))
    await left.read()
    left.cancel()
    await decode.idle()
    decode.error = InvalidRequest("no")
    await cluster.status(request(max_tokens=3, visibility=POLICY))
    assert outcomes() == before and instruments.SHADOW_HELD._value.get() == 0


async def test_the_first_of_n_answers_is_replayed_up_to_a_bound(cluster: Cluster) -> None:
    before = outcomes()
    cluster.decode[0].batch = 64
    await cluster.replies(request(max_tokens=400, visibility=POLICY, n=3))
    await told("measured", before)
    assert [len(seen.continuation_ids) for seen in cluster.decode[0].seen] == [0, MAX_ANSWER_TOKENS, MAX_ANSWER_TOKENS]


async def test_the_rate_is_kept_by_chance() -> None:
    async with started(shadow=ShadowConfig(rate=0.25)) as c:
        c.router.service.parts.shadows._rng = random.Random(3)
        before = outcomes()
        for _ in range(40):
            await c.complete(request(max_tokens=1, visibility=POLICY))
            await until(lambda: instruments.SHADOW_HELD._value.get() == 0)
        assert 5 <= outcomes()["measured"] - before.get("measured", 0) <= 15


async def test_a_replay_waits_for_room_and_is_given_up_in_time(cluster: Cluster) -> None:
    decode, parts = cluster.decode[0], cluster.router.service.parts
    for busy in ({"num_used_blocks": 60_000}, {"num_reservations": 40}, {"num_total_blocks": 0}):
        decode.report = ROOM | busy
        await until(lambda: all(load(cluster, decode, name) == value for name, value in busy.items()))  # noqa: B023
        before, parts.shadows._max_wait_s = outcomes(), 0.1
        await cluster.complete(request(max_tokens=2, visibility=POLICY))
        await told("busy", before)
    decode.report = dict(ROOM)
    cluster.prefill[0].report = {"token_layers_per_s": 100.0, "classes": [shoal_pb2.ClassLoad(outstanding_token_layers=1000)]}
    await until(lambda: bool(load(cluster, cluster.prefill[0], "classes")))
    before = outcomes()
    await cluster.complete(request(max_tokens=2, visibility=POLICY))
    await told("busy", before)
    before, parts.shadows._max_wait_s, cluster.prefill[0].report = outcomes(), 30.0, {}
    await cluster.complete(request(max_tokens=2, visibility=POLICY))
    await told("measured", before)
    assert sum(bool(seen.continuation_ids) for seen in decode.seen) == 2


async def test_a_replay_gives_way_when_others_wait(cluster: Cluster) -> None:
    before, decode = outcomes(), cluster.decode[0]
    await cluster.complete(request(max_tokens=4, visibility=POLICY))
    decode.delay_s = 0.5
    await until(lambda: decode.running == 1)
    decode.report = ROOM | {"classes": [shoal_pb2.ClassLoad(priority="normal", num_waiting_reqs=2)]}
    await told("gave_way", before)
    await decode.idle()


async def test_a_failed_replay_is_counted_and_not_tried_again(cluster: Cluster) -> None:
    before, decode = outcomes(), cluster.decode[0]
    retries = instruments.RETRIES.labels("unavailable")._value.get()
    decode.background_error = Unavailable("lost")
    await cluster.complete(request(max_tokens=2, visibility=POLICY))
    await told("failed", before)
    assert len(decode.seen) == 2 and instruments.RETRIES.labels("unavailable")._value.get() == retries
    decode.background_error, before = None, outcomes()
    await cluster.complete(request(max_tokens=2, visibility=POLICY))  # and the work goes on
    await told("measured", before)


async def test_memory_is_bounded_and_a_stopped_router_drops_what_it_holds() -> None:
    cluster = started()
    cluster.decode[0].report = {}  # an unknown worker has no room to spare
    async with cluster as c:
        before = outcomes()
        for _ in range(MAX_HELD + 2):
            await c.complete(request(max_tokens=1, visibility=POLICY))
        assert instruments.SHADOW_HELD._value.get() == MAX_HELD
        assert outcomes()["no_memory"] - before.get("no_memory", 0) == 2
    assert outcomes()["stopped"] - before.get("stopped", 0) == MAX_HELD and instruments.SHADOW_HELD._value.get() == 0


async def test_one_long_prompt_too_many_is_not_held(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.router.shadow.MAX_HELD_TOKENS", 30)
    before = outcomes()
    await cluster.complete(request(list(range(30)), max_tokens=1, visibility=POLICY))
    await told("no_memory", before)


async def test_without_a_rate_nothing_is_kept_or_reported() -> None:
    async with Cluster() as c:
        await c.complete(request(max_tokens=2, visibility=POLICY))
        assert not c.router.service.server_info().quality and len(c.decode[0].seen) == 1
        assert "shadow requests" not in {task.get_name() for task in asyncio.all_tasks()}


def test_serve_hands_its_settings_to_its_routers() -> None:
    given = {
        "shadow_rate": 0.25,
        "shadow_max_kl": 0.5,
        "shadow_window": 90,
        "shadow_cool_down_s": 5,
        "visibilities": "full,pop:2",
    }
    config = ServeConfig.from_mapping(given)
    arguments = router_arguments(config, RouterPlace("router", "127.0.0.1:0", ""), "127.0.0.1:1")
    read = ShadowConfig.read(command.make_context("router", arguments[2:]).params)
    assert read == config.shadow == ShadowConfig(0.25, max_kl=0.5, window=90, cool_down_s=5.0)


def test_a_router_without_full_or_without_anything_shallow_does_not_start() -> None:
    for visibilities, words in ((POLICY, "add full"), ("speed:30", "name none"), ("full", "name none")):
        config = RouterConfig(
            "smollm2-135m", controller="127.0.0.1:1", visibilities=(Visibility.parse(visibilities),), shadow=SHADOW
        )
        with pytest.raises(InvalidConfig, match=words):
            Router(config)
