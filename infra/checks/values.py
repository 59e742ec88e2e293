"""`python -m infra.checks.values`: the chart's values.schema.json and table of values, from values.yaml. Knows its comments.

values.yaml is the one place where a value, its default and its meaning are written; RULES adds what a default cannot say.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).resolve().parents[1] / "charts" / "shoal"
SCHEMA: Final = CHART / "values.schema.json"
QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?$"
_PORT: Final = {"minimum": 1, "maximum": 65535}
_SECONDS: Final = {"type": "number", "minimum": 0}
_SHARE: Final = {"type": "number", "minimum": 0, "maximum": 1}
_POSITIVE: Final = {"type": "number", "exclusiveMinimum": 0}
_RESOURCES: Final = {
    "type": "object",
    "required": ["cpu", "memory"],
    "additionalProperties": {"type": ["string", "number"], "pattern": QUANTITY, "minimum": 0},
}
_PEER: Final = {"type": "array", "items": {"type": "object"}}

RULES: Final[dict[str, dict[str, Any]]] = {  # a dotted path, or its end after `*.`: what the schema says beside the type
    "*.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "*.digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "*.repository": {"minLength": 0},
    "images.worker.variant": {"enum": ["cuda", "cpu"]},
    "imagePullSecrets": _PEER,
    "model.source": {"enum": ["embedded", "pvc", "oci", "hubCache"]},
    "serving.visibilities": {
        "type": "array",
        "minItems": 1,
        "uniqueItems": True,
        "items": {"type": "string"},
    },
    "serving.dtype": {"enum": ["float32", "bfloat16"]},
    "serving.kvMemory": {"pattern": r"^[0-9]+(\.[0-9]+)?([kmgtKMGT]i?)?[bB]?$"},
    "serving.threadsPerWorker": {"minimum": 1},
    "serving.blockSize": {"minimum": 1},
    "serving.tokenBudget": {"minimum": 1},
    "serving.maxRequests": {"minimum": 1},
    "serving.maxBoundaryTokens": {"minimum": 1},
    "serving.maxWaitS": _SECONDS,
    "serving.localCachedShare": _SHARE,
    "serving.startTimeoutS": _POSITIVE,
    "serving.hangTimeoutS": _POSITIVE,
    "serving.graceS": _SECONDS,
    "serving.logLevel": {"enum": ["debug", "info", "warning", "error"]},
    "serving.logFormat": {"enum": ["json", "text"]},
    "promptImages.maxImageMB": _POSITIVE | {"maximum": 20},
    "promptImages.maxImagesMB": _POSITIVE | {"maximum": 200},
    "promptImages.maxImageMegapixels": _POSITIVE | {"maximum": 40},
    "quality.shadowRate": _SHARE,
    "quality.minAgreement": _SHARE,
    "quality.maxKl": _SECONDS,
    "quality.window": {"minimum": 1},
    "quality.minSamples": {"minimum": 1},
    "quality.hysteresis": _SHARE,
    "quality.coolDownS": _SECONDS,
    "transfer.backend": {"enum": ["nccl", "gloo"]},
    "transfer.leaseS": _POSITIVE,
    "transfer.heartbeatS": {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
    "transfer.heartbeatMisses": {"minimum": 1},
    "transfer.env": {"type": "object", "additionalProperties": {"type": "string"}},
    "*.replicas": {"minimum": 1},
    "*.minReplicas": {"minimum": 1},
    "*.maxReplicas": {"minimum": 1},
    "*.resources.requests": _RESOURCES,
    "*.resources.limits": _RESOURCES,
    "*.shm": {"pattern": QUANTITY},
    "*.gpuResource": {"minLength": 1},
    "router.grpcPort": _PORT,
    "router.httpMaxBodyMB": _POSITIVE | {"maximum": 1024},
    "router.httpPort": {"minimum": 0, "maximum": 65535},
    "router.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "router.autoscaling.targetCPUPercent": {"minimum": 1, "maximum": 100},
    "router.podDisruptionBudget.maxUnavailable": {"minimum": 1},
    "ray.version": {"pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
    "autoscaling.ttftS": _SECONDS,
    "autoscaling.tpotS": _SECONDS,
    "autoscaling.quantile": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "autoscaling.targetUtilisation": {"exclusiveMinimum": 0, "maximum": 1},
    "autoscaling.startS": _SECONDS,
    "autoscaling.upCooldownS": _SECONDS,
    "autoscaling.downCooldownS": _SECONDS,
    "ray.upgradeStrategy": {"enum": ["None", "Recreate"]},
    "tls.mode": {"enum": ["certManager", "secrets", "none"]},
    "networkPolicy.collectorPorts": {"type": "array", "items": {"type": "integer", **_PORT}},
    "networkPolicy.clients": _PEER,
    "networkPolicy.operatorNamespace": {"minLength": 1},
    "networkPolicy.dnsNamespace": {"minLength": 1},
    "monitoring.interval": {"pattern": "^[0-9]+(ms|s|m)$"},
    "gateway.parentRefs": _PEER,
    "gateway.inferencePool.endpointPicker.port": _PORT,
    "gateway.inferencePool.endpointPicker.failureMode": {"enum": ["FailOpen", "FailClose"]},
}
_WHOLE: Final = ("requests", "limits", "endpointPicker", "tokenSecret")  # mappings that are one row
_COMMON: Final = {  # what such a value means wherever it stands
    "pullPolicy": "Always, IfNotPresent or Never",
    "requests": "what each pod reserves",
    "limits": "what each pod may use",
    "nodeSelector": "labels of the nodes for its pods",
    "tolerations": "of the nodes' taints",
    "affinity": "of its pods, as in a PodSpec",
    "priorityClassName": "of its pods",
    "runtimeClassName": "of its pods, as in nvidia",
    "annotations": "of the Service",
}
_LINE = re.compile(r"^(\s*)([A-Za-z][\w.]*):(.*)$")


def defaults() -> dict[str, Any]:
    """values.yaml as Helm reads it."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def comments() -> dict[str, str]:
    """What values.yaml says of each dotted path, on its own line."""
    found, path = dict[str, str](), list[tuple[int, str]]()
    for line in (CHART / "values.yaml").read_text().splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        indent, key, rest = len(match[1]), match[2], match[3]
        path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key)]
        if "  # " in rest:
            found[".".join(name for _, name in path)] = rest.split("  # ", 1)[1].strip()
    return found


def schema() -> dict[str, Any]:
    """A JSON schema (draft 7, what both majors of Helm read) that knows every value and no other."""
    told, used = comments(), set[str]()
    root = _schema_of("", defaults(), told, used) | {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of Shoal's chart",
    }
    root["properties"]["global"] = {"type": "object"}  # Helm hands it to every chart
    if unused := RULES.keys() - used:
        raise LookupError(f"rules for values that values.yaml does not have: {', '.join(sorted(unused))}")
    return dict(sorted(root.items()))


def _schema_of(path: str, value: Any, told: dict[str, str], used: set[str]) -> dict[str, Any]:
    rule: dict[str, Any] = {}
    for name, more in RULES.items():
        if path == name or (name.startswith("*.") and path.endswith(name[1:])):
            rule = rule | more
            used.add(name)
    words = {"description": told[path]} if path in told else {}
    if isinstance(value, dict) and value and "type" not in rule:
        inner = {key: _schema_of(f"{path}.{key}".lstrip("."), item, told, used) for key, item in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": inner} | words | rule
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    plain: dict[str, Any] = {"type": kinds[type(value)]}
    if type(value) is int:
        plain["minimum"] = 0
    return plain | words | rule


def rows() -> Iterator[tuple[str, str, str]]:
    """Each value: its dotted path, its default as JSON, what it means. The decode pool has those of prefill and is left out."""
    told = comments()

    def walk(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
        name = path.rpartition(".")[2]
        if isinstance(value, dict) and value and name not in _WHOLE:
            for key, item in value.items():
                if f"{path}.{key}" != "pools.decode":
                    yield from walk(item, f"{path}.{key}".lstrip("."))
        else:
            yield path, json.dumps(value), told.get(path) or _COMMON[name]

    yield from walk(defaults(), "")


def table() -> str:
    """The table of docs/kubernetes.md."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | `{default}` | {words} |" for path, default, words in rows()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the schema."""
    SCHEMA.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
