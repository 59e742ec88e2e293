"""The parts put together: what a controller is given for its configuration, and a life of a pool over a RayCluster."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from shoal.config.autoscale import AutoscaleConfig
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.machines import FixedMachines, Held, RayMachines
from shoal.controller.pools import PoolChange
from shoal.errors import InvalidConfig, NotFound
from shoal.launch.autoscaling import machines_of, service_of

pytest.importorskip("kmock", reason="the fake Kubernetes API comes with the dev extra")

from tests.fakes.kubernetes import NAMESPACE, FakeApi, fake_api, ray_cluster
from tests.unit.test_autoscaler import Pools, bench

FAST = {"up_cooldown_s": 0.0, "down_cooldown_s": 0.0, "start_s": 0.0}


def config(nodes: str = "fixed", **settings: object) -> ServeConfig:
    joined = {"ray_address": "10.0.0.1:6379", "pool_labels": True} if nodes != "fixed" else {}
    return ServeConfig.from_mapping(
        {"autoscale_decode": "1-4", "autoscale_nodes": nodes, "visibilities": "speed:22", "autoscale": settings} | joined
    )


def test_the_pace_is_the_simulators_on_a_profile_and_else_learned(tmp_path: Path) -> None:
    assert service_of(config()) is None
    file = tmp_path / "mine.yaml"
    shares = {"gemm": 0.5, "attention": 0.5, "weight_read": 0.5, "kv_read": 0.5, "layer_s": 1e-5, "step_s": 1e-3}
    document = {
        "format": "shoal-profile-1",
        "profile": {"name": "mine", "source": "a test"} | shares,
        "gpu": {"name": "two cores", "bf16_tflops": 0.2, "memory_gb": 8, "memory_gb_s": 20},
        "link": {"name": "loopback", "gb_s": 2, "latency": "50us"},
    }
    file.write_text(yaml.safe_dump(document))
    service = service_of(config(profile=str(file)))
    assert service is not None and service.source == "profile" and not service.steps_hold_prompts
    assert 0 < service.prefill_s(100) < service.prefill_s(1000) and 0 < service.step_s(1) < service.step_s(64)
    assert service.step_s(8) < service.step_s(8, 30_000)
    with pytest.raises(InvalidConfig, match="cannot read the profile"):
        service_of(config(profile=str(tmp_path / "none.yaml")))


async def test_machines_are_those_that_the_configuration_names() -> None:
    assert type(machines_of(config())) is FixedMachines and type(machines_of(config("ray"))) is RayMachines
    async with fake_api(ray_cluster()) as (_, url):
        own = {"raycluster": "shoal", "namespace": NAMESPACE, "kubernetes_api": url}
        found = await asyncio.to_thread(machines_of, config("kuberay", **own))
        assert found.may_come and await found.most(Pool.DECODE) == 8
        with pytest.raises(NotFound, match="there is no RayCluster inference/herring"):
            await asyncio.to_thread(machines_of, config("kuberay", **(own | {"raycluster": "herring"})))


class OnPods(Pools):
    """The controller's pool, on the pods of the fake API: workers start where there is a free one, and drain until told."""

    def __init__(self, api: FakeApi) -> None:
        super().__init__()
        self.api = api
        self.running: list[str | None] = [api.pods("decode")[0]]
        self.draining: list[str] = []

    def set_pool_sizes(
        self, sizes: Mapping[Pool, int], *, drain_s: float | None = None, allow_pending: bool = False
    ) -> PoolChange:
        change = super().set_pool_sizes(sizes, drain_s=drain_s, allow_pending=allow_pending)
        self.running += [None] * (self.num - len(self.running))
        self.draining += [pod for pod in self.running[self.num :] if pod is not None]
        self.running = self.running[: self.num]
        return change

    def place(self) -> None:
        """Ray finds the free pods."""
        for pod in self.api.pods("decode"):
            if pod not in (*self.running, *self.draining) and None in self.running:
                self.running[self.running.index(None)] = pod

    def held(self, pool: Pool) -> Held:
        placed = [pod for pod in (*self.running, *self.draining) if pod is not None]
        return Held(frozenset(placed), self.running.count(None))


async def test_a_pool_on_a_raycluster_grows_shrinks_and_no_pod_goes_before_its_worker() -> None:
    async with fake_api(ray_cluster()) as (api, url):
        settings = FAST | {"raycluster": "shoal", "namespace": NAMESPACE, "kubernetes_api": url}
        machines = await asyncio.to_thread(machines_of, config("kuberay", **settings))
        async with bench() as (scaler, _, worker, _machines):
            pools = OnPods(api)
            scaler._pools, scaler._machines = pools, machines
            load = worker.report.load
            load.num_reservations = load.num_running_reqs = load.num_waiting_reqs = 4
            await scaler.look()
            assert pools.num == 3 and api.group("decode")["replicas"] == 3
            api.operate()
            pools.place()
            one, two, three = api.pods("decode")
            load.num_reservations = load.num_running_reqs = load.num_waiting_reqs = 0
            await scaler.look()
            assert pools.draining == [three] and api.group("decode")["replicas"] == 3, "it drains: its pod stays"
            api.operate()
            await scaler.look()
            assert pools.draining == [three, two] and api.pods("decode") == [one, two, three]
            pools.draining.remove(three)
            await scaler.look()
            api.operate()
            assert api.pods("decode") == [one, two] and api.group("decode")["replicas"] == 2
            pools.draining.remove(two)
            await scaler.look()
            api.operate()
            assert api.pods("decode") == [one] and not api.deleted_at_random
            assert api.group("prefill")["replicas"] == 1


def test_the_page_names_every_setting_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "autoscaling.md").read_text()
    table = page.partition("## Settings")[2].partition("\n## ")[0]
    for name, field in AutoscaleConfig.__dataclass_fields__.items():
        shown = f"{field.default:g}" if isinstance(field.default, float) else field.default or "–"
        row = next((line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line), "")
        assert row and str(shown) in row, f"docs/autoscaling.md should have a row for {name}, {shown}"
