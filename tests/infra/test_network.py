"""The NetworkPolicies open each plane and nothing beside it: who reaches whom, on which port, evaluated as Kubernetes does."""

from collections.abc import Iterator

import pytest

from infra.checks.charts import Object, objects, of_kind, pods
from tests.infra.conftest import need

KV = 37777  # any ephemeral port
PORTS = (50050, 50052, 6379, 8265, KV)
WORKERS = ("prefill", "decode")
RAY = ("controller", "ray-head", *WORKERS)


class Net:
    """Pods by component, and the policies over them."""

    def __init__(self, values: str) -> None:
        manifests = objects(values)
        self._labels = {place.component: place.labels for place in pods(manifests)}
        self._policies = of_kind(manifests, "NetworkPolicy")

    def reaches(self, source: str, target: str, port: int) -> bool:
        """Components by name; `ns:NAME` is a pod of another namespace, `other` one of this namespace that is not ours."""
        return self._allows("Egress", source, target, port) and self._allows("Ingress", target, source, port)

    def _allows(self, direction: str, subject: str, peer: str, port: int) -> bool:
        if subject not in self._labels:
            return True  # not ours to restrict
        chosen = [
            p
            for p in self._policies
            if direction in p["spec"]["policyTypes"] and _selects(p["spec"]["podSelector"], self._labels[subject])
        ]
        return not chosen or any(self._rule_allows(rule, peer, port) for policy in chosen for rule in _rules(policy, direction))

    def _rule_allows(self, rule: Object, peer: str, port: int) -> bool:
        if "ports" in rule and port not in [entry["port"] for entry in rule["ports"]]:
            return False
        peers = rule.get("from", rule.get("to"))
        return peers is None or any(self._is_peer(entry, peer) for entry in peers)

    def _is_peer(self, entry: Object, peer: str) -> bool:
        if "namespaceSelector" in entry:
            wanted = entry["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            return peer == f"ns:{wanted}"
        if "ipBlock" in entry:
            return peer == f"ip:{entry['ipBlock']['cidr']}"
        return not peer.startswith(("ns:", "ip:")) and _selects(entry["podSelector"], self._labels.get(peer, {}))


def _rules(policy: Object, direction: str) -> Iterator[Object]:
    yield from policy["spec"].get(direction.lower(), [])


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))


@pytest.fixture(scope="module")
def net() -> Net:
    need("helm4")
    return Net("default")


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
    net = Net("tls-issuer")
    assert net.reaches("ip:10.0.0.0/8", "router", 50051) and net.reaches("ns:apps", "router", 8000)
    assert not net.reaches("other", "router", 50051) and net.reaches("test", "router", 50051)


def test_traces_may_leave_where_there_is_a_collector() -> None:
    need("helm4")
    net = Net("two-pool-gpu")
    assert net.reaches("decode", "ns:monitoring", 4318) and not net.reaches("decode", "ns:monitoring", 4317)


def test_without_policies_everything_is_open() -> None:
    need("helm4")
    assert Net("bare").reaches("other", "decode", KV)
