"""The NetworkPolicies open each plane and nothing beside it: who reaches whom, on which port, evaluated as Kubernetes does."""

import pytest

from infra.checks.charts import objects
from infra.checks.network import Net
from tests.infra.conftest import need

KV = 37777  # any ephemeral port
PORTS = (50050, 50052, 6379, 8265, KV)
WORKERS = ("prefill", "decode")
RAY = ("controller", "ray-head", *WORKERS)


@pytest.fixture(scope="module")
def net() -> Net:
    need("helm4")
    return Net(objects("default"))


def test_each_plane_is_open(net: Net) -> None:
    open_ways = [
        ("other", "router", 50051), ("other", "router", 8000), ("test", "router", 50051),
        ("router", "controller", 50050), ("router", "prefill", 50052), ("router", "decode", 50052),
        ("prefill", "decode", KV), ("decode", "prefill", KV), ("decode", "prefill", 50052), ("prefill", "decode", 50052),
        *[(a, b, port) for a in RAY for b in ("controller", "ray-head") for port in (6379, KV)],
        *[("ns:monitoring", component, 9400) for component in ("router", "controller", *WORKERS)],
        ("controller", "ip:0.0.0.0/0", 6443), ("ns:kuberay-system", "ray-head", 8265),
        ("router", "ns:kube-system", 53), ("prefill", "ns:kube-system", 53),
    ]  # fmt: skip
    assert [way for way in open_ways if not net.reaches(*way)] == []


def test_nothing_beside_the_planes_is(net: Net) -> None:
    closed = [
        *[("other", component, port) for component in ("controller", *WORKERS, "ray-head") for port in PORTS],
        ("other", "router", 9400), ("other", "router", 50054), ("ns:default", "router", 50051),
        ("router", "decode", KV), ("router", "ray-head", 6379), ("router", "controller", KV), ("router", "router", 50051),
        ("ns:monitoring", "router", 50051), ("ns:monitoring", "decode", 50052), ("ns:kuberay-system", "decode", KV),
        *[(component, "ip:0.0.0.0/0", 443) for component in ("router", "ray-head", *WORKERS)],
        ("controller", "ip:0.0.0.0/0", 80),
        ("decode", "router", 50051), ("test", "decode", 50052),
    ]  # fmt: skip
    assert [way for way in closed if net.reaches(*way)] == []


def test_named_clients_replace_the_namespace() -> None:
    need("helm4")
    net = Net(objects("tls-issuer"))
    assert net.reaches("ip:10.0.0.0/8", "router", 50051) and net.reaches("ns:apps", "router", 8000)
    assert not net.reaches("other", "router", 50051) and net.reaches("test", "router", 50051)


def test_a_gateways_namespace_may_call_the_doors() -> None:
    need("helm4")
    net = Net(objects("adapter-gate"))
    assert net.reaches("ns:gateways", "router", 8000) and net.reaches("other", "router", 50051)
    assert not net.reaches("ns:default", "router", 8000) and not net.reaches("ns:gateways", "decode", 50052)


def test_traces_may_leave_where_there_is_a_collector() -> None:
    need("helm4")
    net = Net(objects("two-pool-gpu"))
    assert net.reaches("decode", "ns:monitoring", 4318) and not net.reaches("decode", "ns:monitoring", 4317)


def test_without_policies_everything_is_open() -> None:
    need("helm4")
    assert Net(objects("bare")).reaches("other", "decode", KV)
