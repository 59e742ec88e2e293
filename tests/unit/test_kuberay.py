"""A RayCluster's worker groups follow the pools, against a stateful API server and an operator that does as KubeRay does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.config.autoscale import AutoscaleConfig, Bounds
from shoal.config.worker import Pool
from shoal.controller.kuberay import KubeRayMachines
from shoal.controller.kubernetes import Access, KubernetesApi
from shoal.controller.machines import Held
from shoal.controller.worker_groups import Pod, WorkerGroup, settled
from shoal.errors import InvalidConfig, InvalidRequest, NotFound, ShoalError, Unauthenticated, Unavailable

pytest.importorskip("kmock", reason="the fake Kubernetes API comes with the dev extra")

from tests.fakes.kubernetes import CLUSTERS, NAMESPACE, FakeApi, fake_api, ray_cluster

BOUNDS = {Pool.PREFILL: Bounds(1, 4), Pool.DECODE: Bounds(1, 8)}


class Bench:
    """Machines over the fake API, and the pools' workers as the controller would tell of them."""

    def __init__(self, api: FakeApi, url: str, **settings: Any) -> None:
        self.api = api
        self.config = AutoscaleConfig(raycluster="shoal", namespace=NAMESPACE, kubernetes_api=url, **settings)
        self.machines = KubeRayMachines(KubernetesApi(Access.of(self.config), self.config.kubernetes_timeout_s), self.config)

    def held(self, prefill: int, *decode: str, unplaced: int = 0) -> dict[Pool, Held]:
        """So many prefill workers on the first pods, decode workers on these."""
        return {
            Pool.PREFILL: Held(frozenset(self.api.pods("prefill")[:prefill]), 0),
            Pool.DECODE: Held(frozenset(decode), unplaced),
        }

    def patches(self) -> int:
        return sum(verb.upper().endswith("PATCH") for verb, _ in self.api.asked)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with fake_api(ray_cluster()) as (api, url):
        yield Bench(api, url)


async def test_a_group_grows_for_workers_that_wait_and_shrinks_by_the_pods_that_drained(bench: Bench) -> None:
    await bench.machines.check(BOUNDS)
    (first,) = bench.api.pods("decode")
    await bench.machines.settle(bench.held(1, first, unplaced=2))
    assert bench.api.group("decode")["replicas"] == 3 and bench.api.group("prefill")["replicas"] == 1
    bench.api.operate()
    one, two, three = bench.api.pods("decode")
    await bench.machines.settle(bench.held(1, one, unplaced=2))  # not placed yet: nothing is given up
    await bench.machines.settle(bench.held(1, one, two, three))
    num_patches = bench.patches()
    await bench.machines.settle(bench.held(1, one, two, three))
    assert bench.patches() == num_patches, "nothing was to be done, and something was written"
    # two ends: its pod is named, and comes off replicas in the same write
    await bench.machines.settle(bench.held(1, one, three))
    group = bench.api.group("decode")
    assert (group["replicas"], group["scaleStrategy"]["workersToDelete"]) == (2, [two])
    assert group["template"] == {"spec": {"containers": []}} and group["maxReplicas"] == 8, "the rest of the group has changed"
    bench.api.operate()
    assert bench.api.pods("decode") == [one, three] and not bench.api.deleted_at_random
    await bench.machines.settle(bench.held(1, one, three))  # and the name is cleared once the pod is gone
    assert bench.api.group("decode")["scaleStrategy"]["workersToDelete"] == []
    assert bench.api.group("prefill")["replicas"] == 1 and "scaleStrategy" not in bench.api.group("prefill")


async def test_a_write_that_lost_a_race_is_made_again_on_what_was_written(bench: Bench) -> None:
    (first,) = bench.api.pods("decode")

    def somebody_labels() -> None:
        bench.api.objects[CLUSTERS, NAMESPACE, "shoal"].patch({"metadata": {"labels": {"touched": "yes"}}})
        bench.api.bump()

    bench.api.before_patch += [somebody_labels, somebody_labels]
    await bench.machines.settle(bench.held(1, first, unplaced=1))
    assert bench.api.group("decode")["replicas"] == 2 and bench.patches() == 3
    assert bench.api.cluster["metadata"]["labels"] == {"touched": "yes"}
    bench.api.before_patch += [somebody_labels] * 9
    with pytest.raises(Unavailable, match="changed by others 5 times"):
        await bench.machines.settle(bench.held(1, first, unplaced=3))


async def test_what_passes_is_tried_again_and_what_does_not_is_said(bench: Bench) -> None:
    (first,) = bench.api.pods("decode")
    held = bench.held(1, first, unplaced=1)
    bench.api.answers += [(503, {}), (429, {"Retry-After": "0"}), (500, {})]
    await bench.machines.settle(held)
    assert bench.api.group("decode")["replicas"] == 2
    cases: list[tuple[int, type[ShoalError], str]] = [
        (401, Unauthenticated, "does not take our token"),
        (403, Unauthenticated, "docs/autoscaling.md lists"),
        (404, NotFound, "there is no RayCluster inference/shoal"),
        (422, InvalidRequest, "with 422: as told: 422"),
    ]
    for status, kind, words in cases:
        bench.api.answers = [(status, {})]
        with pytest.raises(kind, match=words):
            await bench.machines.settle(held)
    async with fake_api(ray_cluster()) as (api, url):
        hasty = Bench(api, url, kubernetes_timeout_s=0.5)
        api.answers = [(429, {"Retry-After": "60"})]
        with pytest.raises(Unavailable, match="429: as told"):
            await hasty.machines.settle(held)
    with pytest.raises(Unavailable, match=r"the Kubernetes API at http://127\.0\.0\.1:1 fails at GET"):
        await Bench(bench.api, "http://127.0.0.1:1", kubernetes_timeout_s=0.3).machines.settle(held)


@pytest.mark.parametrize(
    ("spec", "groups", "kind", "words"),
    [
        ({}, {"decode": {"maxReplicas": 5}}, InvalidConfig, "raise its maxReplicas from 5 to 8, or lower MAX"),
        ({}, {"prefill": {"minReplicas": 2, "replicas": 2}}, InvalidConfig, "lower its minReplicas from 2 to 1, or raise MIN"),
        (
            {},
            {"decode": {"groupName": "gpu"}},
            NotFound,
            "no worker group 'decode' .it has prefill, gpu.; set autoscale",
        ),
        ({}, {"decode": {"numOfHosts": 4}}, InvalidConfig, "has numOfHosts 4"),
        ({}, {"decode": {"suspend": True}}, InvalidConfig, "is suspended"),
        ({"enableInTreeAutoscaling": True}, {}, InvalidConfig, "two autoscalers would write its replicas"),
    ],
)
async def test_a_raycluster_that_does_not_fit_is_refused_before_anything_starts(
    spec: dict[str, Any], groups: dict[str, dict[str, Any]], kind: type[ShoalError], words: str
) -> None:
    cluster = ray_cluster(**groups)
    cluster["spec"] |= spec
    async with fake_api(cluster) as (api, url):
        with pytest.raises(kind, match=words):
            await Bench(api, url).machines.check(BOUNDS)
        assert not any(verb.upper().endswith("PATCH") for verb, _ in api.asked)


async def test_a_missing_raycluster_and_missing_rights_are_found_before_anything_starts() -> None:
    async with fake_api() as (api, url):
        with pytest.raises(NotFound, match="there is no RayCluster inference/shoal: check autoscale"):
            await Bench(api, url).machines.check(BOUNDS)
    async with fake_api(ray_cluster()) as (api, url):
        machines = Bench(api, url).machines
        before = str(api.cluster)
        for num_allowed, words in ((0, "GET"), (1, "GET .*/pods"), (2, "PATCH")):
            with pytest.raises(Unauthenticated, match=f"forbids {words}"):
                api.num_allowed = num_allowed
                await machines.check(BOUNDS)
        api.num_allowed = None
        await machines.check(BOUNDS)
        assert str(api.cluster) == before, "looking has changed something"


async def test_tokens_are_read_anew_for_each_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    async with fake_api(ray_cluster()) as (api, url):
        bench = Bench(api, url, kubernetes_token_file=str(token))
        await bench.machines.settle({})
        token.write_text("two\n")
        await bench.machines.settle({})
        assert list(dict.fromkeys(api.tokens)) == ["Bearer one", "Bearer two"]


def test_access_is_the_pods_own_unless_another_is_named(tmp_path: Path) -> None:
    config = AutoscaleConfig(raycluster="shoal")
    with pytest.raises(InvalidConfig, match="runs in no Kubernetes pod"):
        Access.of(config, tmp_path, {})
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "team-a\n")):
        (tmp_path / name).write_text(text)
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = Access.of(config, tmp_path, inside)
    assert (access.url, access.namespace) == ("https://[fd00::1]:6443", "team-a")
    assert (access.token_file, access.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(InvalidConfig, match="cannot read /nowhere"):
        Access.of(AutoscaleConfig(raycluster="shoal", kubernetes_api="http://h:1", kubernetes_token_file="/nowhere"))


def group(replicas: int, *to_delete: str, least: int = 1, most: int = 8) -> WorkerGroup:
    return WorkerGroup("decode", replicas, least, most, to_delete)


def pods(*names: str) -> list[Pod]:
    """`-x`: it is leaving, `-w`: it waits to run."""
    return [Pod(name, "decode", not name.endswith("-w"), name.endswith("-x")) for name in names]


def test_a_group_settles() -> None:
    def at(*machines: str, unplaced: int = 0) -> Held:
        return Held(frozenset(machines), unplaced)

    assert settled(group(2), pods("a", "b"), at("a", "b")) == group(2)
    assert settled(group(2), pods("a", "b"), at("a", "b", unplaced=3)) == group(5)
    assert settled(group(2, most=3), pods("a", "b"), at("a", "b", unplaced=3)) == group(3, most=3)
    assert settled(group(3), pods("a", "b", "c-w"), at("a")) == group(1, "c-w", "b")  # one that never ran goes first
    assert settled(group(3, least=2), pods("a", "b", "c"), at("a")) == group(2, "b", least=2)
    assert settled(group(3), pods("a", "b", "c-x"), at("a")) == group(2, "b")
    assert settled(group(3), pods("a", "b", "c"), at("a", "elsewhere")) == group(3)  # whose pod is it? none is given up
    assert settled(group(3), pods("a", "b", "c"), at("a", unplaced=1)) == group(3)  # it may come to b or c
    assert settled(group(2, "gone", "b"), pods("a", "b", "c"), at("a", "c")) == group(2, "b")
    assert settled(group(3), pods("a"), at("a")) == group(3)  # two are still to be made: named when they are


@pytest.mark.parametrize(
    "answer",
    [
        {"items": [None]},
        {"items": 3},
        {"items": [{"metadata": 3}]},
        {"metadata": {}, "spec": {"workerGroupSpecs": [3]}},
        {"metadata": {}, "spec": {"workerGroupSpecs": [{"groupName": "prefill", "replicas": "many"}]}},
        {"metadata": {}, "spec": {"workerGroupSpecs": [{"groupName": "prefill", "replicas": 1e999}]}},
    ],
)
async def test_answers_of_another_shape_are_told_and_asked_for_again(bench: Bench, answer: Any) -> None:
    read = bench.machines._api.get
    damaged = "pods" if "items" in answer else "rayclusters"

    async def get(path: str, **query: str) -> Any:
        return answer if damaged in path else await read(path, **query)

    bench.machines._api.get = get  # type: ignore[method-assign]
    for ask in (bench.machines.check(BOUNDS), bench.machines.settle(bench.held(1))):
        with pytest.raises(Unavailable, match=r"cannot be read|is no RayCluster"):
            await ask
    bench.machines._api.get = read  # type: ignore[method-assign]
    await bench.machines.check(BOUNDS)


@pytest.mark.parametrize("what", ["drip", "flood", "depth"])
async def test_answers_without_end_are_given_up(what: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100 if what == "flood" else 50):
                writer.write(bytes(1 << 20) if what == "flood" else b"[" * 20_000 if what == "depth" else b" ")
                await writer.drain()
                await asyncio.sleep(0.1 if what == "drip" else 0)
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        api = KubernetesApi(Access(f"http://{host}:{port}", None, None, NAMESPACE), 1.0)
        if what == "depth":
            assert await api.get("/x") == {}
        else:
            with pytest.raises(Unavailable, match="more than 64 MiB" if what == "flood" else "fails at GET /x: TimeoutError"):
                await api.get("/x")
