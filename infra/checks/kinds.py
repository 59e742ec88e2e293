"""Strict JSON schemas of kinds that Kubernetes itself does not have, as far as the chart uses them. Knows no manifest.

Written from the public references of cert-manager v1, the Prometheus operator v1, Gateway API v1 and its Inference Extension v1:
what the chart sets must be in here, so that a misspelt field is found without those projects' definitions.
"""

from typing import Any, Final

_NAME: Final = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_TEXTS: Final = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION: Final = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
_LABELS: Final = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


def _kind(version: str, kind: str, spec: dict[str, Any]) -> tuple[tuple[str, str], dict[str, Any]]:
    metadata = _object(("name", "labels"), name=_NAME, labels=_LABELS, annotations=_LABELS)
    whole = _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
    return (version, kind), whole


_ISSUER_REF: Final = _object(("name",), name=_NAME, kind={"enum": ["Issuer", "ClusterIssuer"]}, group={"type": "string"})
_CERTIFICATE: Final = _object(
    ("secretName", "issuerRef"),
    isCA={"type": "boolean"},
    commonName={"type": "string", "maxLength": 64},
    dnsNames=_TEXTS,
    secretName=_NAME,
    duration=_DURATION,
    renewBefore=_DURATION,
    usages=_list({"enum": ["digital signature", "server auth", "client auth"]}),
    privateKey=_object(
        algorithm={"enum": ["RSA", "ECDSA"]}, size={"type": "integer"}, rotationPolicy={"enum": ["Always", "Never"]}
    ),
    issuerRef=_ISSUER_REF,
)
_KEY: Final = _object(("name", "key"), name=_NAME, key={"type": "string"})
_ENDPOINT: Final = _object(
    ("port", "path"),
    port={"type": "string"},
    path={"type": "string"},
    interval=_DURATION,
    scheme={"enum": ["http", "https"]},
    tlsConfig=_object(
        ("serverName", "ca", "cert", "keySecret"),
        serverName={"type": "string"},
        ca=_object(("secret",), secret=_KEY),
        cert=_object(("secret",), secret=_KEY),
        keySecret=_KEY,
    ),
)
_SELECTOR: Final = _object(("matchLabels",), matchLabels=_LABELS)
_RULE: Final = _object(
    ("expr",), alert={"type": "string"}, record={"type": "string"}, expr={"type": "string"}, labels=_LABELS, annotations=_LABELS,
    **{"for": _DURATION, "keep_firing_for": _DURATION},
)  # fmt: skip
_PARENT: Final = _object(
    ("name",),
    group={"type": "string"},
    kind={"type": "string"},
    name=_NAME,
    namespace=_NAME,
    sectionName={"type": "string"},
    port=_PORT,
)
_BACKEND: Final = _object(("name",), group={"type": "string"}, kind={"type": "string"}, name=_NAME, namespace=_NAME, port=_PORT)
_TARGET: Final = _object(("group", "kind", "name"), group={"type": "string"}, kind={"type": "string"}, name=_NAME)


def _route(match: dict[str, Any], **rule: Any) -> dict[str, Any]:
    return _object(
        ("parentRefs", "rules"),
        parentRefs=_list(_PARENT),
        hostnames=_TEXTS,
        rules=_list(_object(("backendRefs",), matches=_list(match), backendRefs=_list(_BACKEND), **rule)),
    )


_PATH: Final = _object(("type", "value"), type={"enum": ["Exact", "PathPrefix"]}, value={"type": "string", "pattern": "^/"})
_METHOD: Final = _object((), type={"enum": ["Exact", "RegularExpression"]}, service={"type": "string"}, method={"type": "string"})

_MONITORING: Final = "monitoring.coreos.com/v1"
_GATEWAY: Final = "gateway.networking.k8s.io/v1"
_GROUP: Final = _object(("name", "rules"), name={"type": "string"}, interval=_DURATION, rules=_list(_RULE))
_PICKER: Final = _object(
    ("name",),
    group={"type": "string"},
    kind={"type": "string"},
    name=_NAME,
    port=_object(("number",), number=_PORT),
    failureMode={"enum": ["FailOpen", "FailClose"]},
)
_POOL: Final = _object(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=_SELECTOR,
    targetPorts=_list(_object(("number",), number=_PORT)),
    endpointPickerRef=_PICKER,
)
_BACKEND_TLS: Final = _object(
    ("targetRefs", "validation"),
    targetRefs=_list(_TARGET),
    validation=_object(("hostname",), hostname={"type": "string"}, caCertificateRefs=_list(_TARGET)),
)
_SERVICES: Final = _object(("selector", "endpoints"), selector=_SELECTOR, endpoints=_list(_ENDPOINT))
_PODS: Final = _object(("selector", "podMetricsEndpoints"), selector=_SELECTOR, podMetricsEndpoints=_list(_ENDPOINT))
_HTTP_ROUTE: Final = _route(_object((), path=_PATH), timeouts=_object((), request=_DURATION))

SCHEMAS: Final = dict(
    (
        _kind("cert-manager.io/v1", "Issuer", _object((), selfSigned=_object(), ca=_object(("secretName",), secretName=_NAME))),
        _kind("cert-manager.io/v1", "Certificate", _CERTIFICATE),
        _kind(_MONITORING, "ServiceMonitor", _SERVICES),
        _kind(_MONITORING, "PodMonitor", _PODS),
        _kind(_MONITORING, "PrometheusRule", _object(("groups",), groups=_list(_GROUP))),
        _kind(_GATEWAY, "GRPCRoute", _route(_object((), method=_METHOD))),
        _kind(_GATEWAY, "HTTPRoute", _HTTP_ROUTE),
        _kind(_GATEWAY, "BackendTLSPolicy", _BACKEND_TLS),
        _kind("inference.networking.k8s.io/v1", "InferencePool", _POOL),
    )
)
