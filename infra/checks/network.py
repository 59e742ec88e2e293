"""Who reaches whom under NetworkPolicies, evaluated as Kubernetes does. Knows pods of one namespace and names of others."""

from collections.abc import Iterator

from infra.checks.charts import Object, of_kind, pods


class Net:
    """Pods by component, and the policies over them."""

    def __init__(self, manifests: tuple[Object, ...]) -> None:
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
