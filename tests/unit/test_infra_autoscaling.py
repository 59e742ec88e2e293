"""The chart's RayCluster and the controller's autoscaler fit each other: bounds, names, rights, and nothing else is changed."""

import copy
from dataclasses import replace

import pytest
import yaml

from infra.checks.charts import of_kind, parse
from infra.checks.render import TARGETS
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.kuberay import KubeRayMachines
from shoal.controller.kubernetes import Access, KubernetesApi
from shoal.controller.machines import Held

pytest.importorskip("kmock", reason="the fake Kubernetes API comes with the dev extra")

from tests.fakes.kubernetes import NAMESPACE, fake_api

(RENDERED,) = [path for path in TARGETS if path.parent.name == "rendered"]


async def test_the_autoscaler_takes_the_charts_raycluster_and_needs_no_other_rights() -> None:
    manifests = parse(RENDERED.read_text())
    (text,) = [item["data"]["serve.yaml"] for item in of_kind(manifests, "ConfigMap") if "serve.yaml" in item["data"]]
    config = ServeConfig.from_mapping(yaml.safe_load(text))
    (cluster,), (role,) = of_kind(manifests, "RayCluster"), of_kind(manifests, "Role")
    cluster["metadata"] |= {"namespace": NAMESPACE, "resourceVersion": "1"}
    before = copy.deepcopy(cluster["spec"]["workerGroupSpecs"])
    bounds = {pool: own for pool in Pool if (own := config.autoscale_bounds(pool)) is not None}
    assert bounds.keys() == set(Pool) and config.autoscale_nodes == "kuberay"
    async with fake_api(cluster) as (api, url):
        settings = replace(config.autoscale, namespace=NAMESPACE, kubernetes_api=url)
        machines = KubeRayMachines(KubernetesApi(Access.of(settings), 10.0), settings)
        await machines.check(bounds)
        (one,) = api.pods("decode")
        held = {Pool.PREFILL: Held(frozenset(api.pods("prefill")), 0), Pool.DECODE: Held(frozenset({one}), 2)}
        await machines.settle(held)
        after = copy.deepcopy(api.cluster["spec"]["workerGroupSpecs"])
        used = {
            (verb.rpartition(".")[2].lower(), path.split("/")[-2 if path.endswith("/shoal") else -1]) for verb, path in api.asked
        }
    assert [group["replicas"] for group in after] == [1, 3]
    for group in (*before, *after):
        del group["replicas"]
        group.pop("scaleStrategy", None)
    assert after == before, "the autoscaler has changed more than sizes"
    allowed = {(_VERBS[verb], kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    assert used <= allowed


_VERBS = {"get": "get", "list": "get", "patch": "patch"}  # as HTTP has them
