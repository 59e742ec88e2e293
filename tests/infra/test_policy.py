"""What every pod of every file of the matrix must hold: no root, no `latest`, requests and limits, probes, no privilege."""

import re

from infra.checks.charts import Object, PodPlace, of_kind, pods


def test_no_pod_runs_as_root_or_with_a_token(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        pod = place.spec["securityContext"]
        assert pod["runAsNonRoot"] is True and pod["runAsUser"] >= 10000 and pod["runAsGroup"] >= 10000, place.name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, place.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & place.spec.keys(), place.name
        assert place.spec["automountServiceAccountToken"] is (
            place.component == "controller" and "serviceAccountName" in place.spec
        )
        assert not [volume for volume in place.spec.get("volumes", []) if "hostPath" in volume], place.name


def test_no_container_has_a_privilege(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        for container in place.containers:
            security = dict(container["securityContext"])
            capabilities = security.pop("capabilities")
            assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}, place.name
            assert capabilities["drop"] == ["ALL"], place.name
            added = capabilities.get("add", [])
            assert added == (["IPC_LOCK"] if _uses_rdma(container) else []), place.name  # registering memory takes it
            assert [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"], f"{place.name} cannot write"


def test_images_are_pinned(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        for container in place.containers:
            image, policy = container["image"], container["imagePullPolicy"]
            assert re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", image), image
            assert policy in ("Always", "IfNotPresent", "Never")


def test_every_container_has_requests_and_limits(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        for container in place.containers:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory"} <= requests.keys() and {"cpu", "memory"} <= limits.keys(), place.name
            assert requests["memory"] == limits["memory"], f"{place.name}: memory beyond the request is taken back by a kill"
            devices = requests.keys() - {"cpu", "memory"}
            assert all(requests[name] == limits[name] for name in devices), f"{place.name}: devices cannot be overcommitted"


def test_everything_that_stays_has_probes(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        if place.component == "test":
            continue
        (container,) = place.spec["containers"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), place.name
        ports = {port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = _port(container[kind])
            assert asked in ports or asked == 52365, f"{place.name}: {kind} asks a port that nothing listens on"
        patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        assert patience >= 120, f"{place.name}: too little time to start"
        alive = container["livenessProbe"]
        assert alive.get("grpc", {}).get("service", "shoal.live") == "shoal.live", (
            "a router without workers is no reason for a restart"
        )


def test_routers_drain_longer_than_a_lease(manifests: tuple[Object, ...]) -> None:
    (router,) = [place for place in pods(manifests) if place.component == "router"]
    (controller,) = [item for item in of_kind(manifests, "ConfigMap") if "serve.yaml" in item["data"]]
    lease_s = float(re.search(r"lease_s: ([\d.]+)", controller["data"]["serve.yaml"])[1])  # type: ignore[index]
    (container,) = router.containers
    drain_s = float(next(arg for arg in container["args"] if arg.startswith("--drain-s=")).partition("=")[2])
    pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert lease_s < drain_s < router.spec["terminationGracePeriodSeconds"] - pre_stop_s


def test_selectors_find_their_pods_and_nothing_else(manifests: tuple[Object, ...]) -> None:
    places = [place for place in pods(manifests) if place.component != "test"]
    for item in manifests:
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            labels = spec["selector"]
        elif item["kind"] in ("PodMonitor", "PodDisruptionBudget", "InferencePool", "Deployment"):
            labels = spec["selector"]["matchLabels"]
        else:
            continue
        found = [place.component for place in places if labels.items() <= place.labels.items()]
        assert len(found) == 1, f"{item['kind']} {item['metadata']['name']} selects {found}"


def test_disruption_budgets_are_of_a_kind_that_counts(manifests: tuple[Object, ...]) -> None:
    """Of a RayCluster's pods Kubernetes cannot tell how many there should be: it takes a whole minAvailable and nothing else."""
    for item in of_kind(manifests, "PodDisruptionBudget"):
        component = item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        if component in ("prefill", "decode"):
            (cluster,) = of_kind(manifests, "RayCluster")
            (group,) = [group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == component]
            assert "maxUnavailable" not in item["spec"] and type(item["spec"]["minAvailable"]) is int
            assert 0 < item["spec"]["minAvailable"] < group["minReplicas"], "else a node could never be emptied"


def test_clients_certificates_make_nobody_a_member(manifests: tuple[Object, ...]) -> None:
    certificates = {item["metadata"]["name"].removeprefix("shoal-"): item["spec"] for item in of_kind(manifests, "Certificate")}
    issuers = {name: spec["issuerRef"]["name"] for name, spec in certificates.items() if not spec.get("isCA")}
    for name, issuer in issuers.items():
        assert (issuer == "shoal-ca") is (name in ("cluster", "prometheus")), name
    assert all(spec["dnsNames"] == ["shoal-cluster"] for name, spec in certificates.items() if name == "cluster")
    assert not [name for name, spec in certificates.items() if name != "cluster" and "shoal-cluster" in spec.get("dnsNames", [])]


def test_named_ports_exist(manifests: tuple[Object, ...]) -> None:
    for item in manifests:
        if item["kind"] not in ("Service", "PodMonitor"):
            continue
        selector = item["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        (place,) = [place for place in pods(manifests) if labels.items() <= place.labels.items()]
        names = {port["name"] for container in place.containers for port in container["ports"]}
        wanted = item["spec"].get("ports") or item["spec"]["podMetricsEndpoints"]
        assert {port.get("targetPort", port["port"]) for port in wanted} <= names, item["metadata"]["name"]


def test_everything_carries_the_recommended_labels(manifests: tuple[Object, ...]) -> None:
    wanted = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "version", "managed-by", "part-of")}
    for item in manifests:
        assert wanted <= item["metadata"]["labels"].keys(), item["metadata"]["name"]


def _uses_rdma(container: Object) -> bool:
    return any(name.startswith("rdma/") for name in container["resources"]["limits"])


def _port(probe: Object) -> int:
    for way in ("grpc", "httpGet", "tcpSocket"):
        if way in probe:
            return int(probe[way]["port"])
    raise AssertionError(f"no known way to ask: {probe}")


def test_the_policy_finds_what_it_forbids() -> None:
    place = PodPlace("Pod/x", "router", {}, {"containers": [{"image": "shoal:latest"}]})
    assert not re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", place.containers[0]["image"])
