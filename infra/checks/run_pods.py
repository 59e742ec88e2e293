"""`python -m infra.checks.run_pods ROUTER_VENV WORKER_VENV`: the chart's CPU demo as processes, asked as Kubernetes would ask.

Needs root, iproute2, curl, openssl and Helm; the venvs are those of infra/images/try.sh. About three minutes; `make infra-run`.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infra.checks.charts import CHART, parse, render_text
from infra.checks.network import Net
from infra.checks.node import Node, until

FOLDER: Final = Path("/var/tmp/shoal-pods")
FLAGS: Final = (
    "--values",
    str(CHART / "ci" / "cpu-demo-values.yaml"),
    "--set",
    "tls.mode=secrets,tls.door.secretName=door,tls.cluster.secretName=members,serving.localPrefillTokens=0",
)
Check = tuple[str, bool, str]


def main() -> int:
    """Bring the pods up, ask, end them; print a line for each check. Returns the number that failed."""
    venvs = {"router": Path(sys.argv[1]).resolve(), "worker": Path(sys.argv[2]).resolve()}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(mode=0o711)
    manifests = parse(render_text("helm3", *FLAGS))
    node, failures = Node(FOLDER, manifests, venvs), 0
    try:
        node.up()
        for name, passed, words in checks(node, venvs["router"] / "bin" / "shoal", Net(manifests)):
            failures += not passed
            print(f"{'ok  ' if passed else 'FAIL'} {name}: {words}", flush=True)
    finally:
        node.down()
    return failures


def checks(node: Node, shoal: Path, net: Net) -> Iterator[Check]:
    """Probes as a kubelet's, metrics as Prometheus', `helm test`, the end of a controller, a router's drain, who met whom."""
    began = time.monotonic()
    until(lambda: node.inside("test", str(shoal), "health", "-a", f"{node.address('router')}:50054").returncode == 0, 300)
    yield "the router is ready", True, f"after {time.monotonic() - began:.0f} s"
    yield from probes(node, shoal)
    yield from metrics(node)
    yield from helm_test(node, "")
    yield ended(node, "controller")
    yield from helm_test(node, " without a controller")
    yield ended(node, "router")
    flows = {flow for flow in node.flows if flow[0] != "test" or flow[1:] == ("router", 50051)}  # else they are our own questions
    closed, pairs = sorted(flow for flow in flows if not net.reaches(*flow)), {flow[:2] for flow in flows}
    words = f"{len(flows)} ways between {len(pairs)} pairs of pods" if not closed else f"closed: {closed}"
    yield "the NetworkPolicies open what was used", not closed and len(pairs) > 5, words


def probes(node: Node, shoal: Path) -> Iterator[Check]:
    """As the manifests say."""
    for component in ("router", "controller"):
        container = node.places[component].spec["containers"][0]
        for kind in ("livenessProbe", "readinessProbe"):
            asked = container[kind]["grpc"]
            where = f"{node.address(component)}:{asked['port']}"
            done = node.inside("test", str(shoal), "health", "-a", where, "--service", asked.get("service", ""))
            yield f"{component} {kind}", done.returncode == 0, (done.stdout + done.stderr).strip()
    for component in ("ray-head", "prefill", "decode"):
        asked = node.places[component].spec["containers"][0]["livenessProbe"]["httpGet"]
        done = node.inside("test", "curl", "-s", "-m", "5", f"http://{node.address(component)}:{asked['port']}{asked['path']}")
        yield f"{component} livenessProbe", "success" in done.stdout, done.stdout[:60]


def metrics(node: Node) -> Iterator[Check]:
    """With the certificate of a member, and without."""
    for component in ("router", "controller", "prefill", "decode"):
        way = ["curl", "-s", "-m", "5", "--cacert", str(FOLDER / "ca.pem"), "https://shoal-cluster:9400/metrics"]
        way += ["--resolve", f"shoal-cluster:9400:{node.address(component)}"]
        member = ["--cert", str(FOLDER / "member.pem"), "--key", str(FOLDER / "member.key")]
        page = node.inside("test", *way, *member).stdout
        count = sum(line.startswith("shoal_") for line in page.splitlines())
        yield f"{component} metrics over mutual TLS", count > 0, f"{count} series"
        code = node.inside("test", *way).returncode
        yield f"{component} metrics without a certificate", code != 0, f"refused (curl {code})"


def helm_test(node: Node, when: str) -> Iterator[Check]:
    """The containers of the test pod, in order."""
    place = node.places["test"]
    for container in place.containers:
        log = FOLDER / "test.log"
        code = node.run(place, container, log).wait(120)
        yield f"helm test, {container['name']}{when}", code == 0, " ".join(log.read_text().split())[:90]


def ended(node: Node, component: str) -> Check:
    """In order, and nothing stays."""
    status, seconds, left = node.terminate(component)
    words = f"status {status} after {seconds:.1f} s, {len(left)} processes left"
    return f"{component} ends on SIGTERM", status == 0 and not left, words


if __name__ == "__main__":
    sys.exit(main())
