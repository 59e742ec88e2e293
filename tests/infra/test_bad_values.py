"""Values that contradict each other end at template time, with a sentence that names the value and what to change."""

import pytest

from infra.checks.charts import RenderError, render_text

HUB = "model.source=hubCache,model.hubCache.claimName=hub"
GATEWAY = "gateway.enabled=true,gateway.parentRefs[0].name=g,tls.mode=none"
GLOO = "transfer.backend=gloo,pools.prefill.gpus=0,pools.decode.gpus=0"
CASES = {  # values as `--set` takes them: words of the error
    "serving.defaultVisibility=speed:12": '"speed:12" is not among serving.visibilities (full, speed:22): add it there',
    "serving.visibilities[0]=full,serving.visibilities[1]=speed:31": '"speed:31" is deeper than the model, which has 30 layers',
    "serving.visibilities[0]=full,serving.visibilities[1]=speed:0": "the depth must be at least 1",
    "pools.prefill.gpus=0": "transfer.backend nccl moves KV between GPUs and pools.prefill.gpus is 0",
    "pools.decode.gpus=0": "pools.decode.gpus is 0: give every worker of both pools a GPU, or set transfer.backend to gloo",
    "transfer.backend=gloo": "the 1 GPUs of pools.decode.gpus would stand idle",
    f"{GLOO},images.worker.variant=cpu,serving.kvMemory=16GiB": "serving.kvMemory 16GiB does not fit pools.decode.resources",
    f"{GLOO},serving.kvMemory=1TiB": "lower the one or raise the other",
    "pools.decode.gpus=2": "a worker uses one GPU: ask for more workers",
    "images.worker.variant=cpu": "images.worker.variant cpu holds no CUDA",
    "pools.prefill.rdma.count=1": "pools.prefill.rdma needs both resource",
    "pools.prefill.rdma.resource=rdma/x": "pools.prefill.rdma needs both resource",
    f"{GLOO},pools.decode.rdma.count=1,pools.decode.rdma.resource=rdma/x": "only nccl uses RDMA",
    "pools.decode.replicas=9": "must lie within minReplicas and maxReplicas, 1…8",
    "transfer.leaseS=60": "router.drainS is 60 and must be longer than transfer.leaseS, 60",
    "transfer.leaseS=90": "else a router ends while a handoff that it started still holds its lease",
    "router.autoscaling.minReplicas=11": "router.autoscaling.minReplicas 11 exceeds maxReplicas 10",
    "clusterSecret.name=": "clusterSecret.name is empty: make the Secret",
    "tls.mode=secrets": "tls.mode secrets is half configured",
    "tls.mode=secrets,tls.door.secretName=d": "tls.mode secrets is half configured: it needs tls.door.secretName",
    "tls.mode=secrets,tls.door.secretName=d,tls.cluster.secretName=c,tls.door.dnsNames={a.b}": "leave them out",
    "tls.door.secretName=d": "tls.mode is certManager, which would not use it",
    "tls.mode=none,tls.cluster.secretName=c": "tls.mode is none, which would not use it",
    "tls.certManager.doorIssuerRef.name=letsencrypt": "needs tls.mode certManager and tls.door.dnsNames",
    "tls.mode=none,tls.door.requireClientCert=true": "need TLS and tls.mode is none",
    "tls.mode=none,tokens.secretName=t": "whoever is on the way would read them",
    "model.source=embedded,model.name=": "model.source embedded needs model.name",
    "model.source=pvc": "model.source pvc needs model.pvc.claimName",
    "model.source=oci": "needs model.oci.reference with a tag or a digest",
    "model.source=oci,model.oci.reference=registry.example.com:5000/llama": "needs model.oci.reference with a tag",
    f"{HUB},model.hubCache.repository=a/b,model.hubCache.revision=main": "a branch would change under running workers",
    f"{HUB},model.hubCache.repository=llama": "model.source hubCache needs",
    "gateway.enabled=true": "gateway.enabled needs gateway.parentRefs",
    "gateway.enabled=true,gateway.parentRefs[0].name=g": "whom to trust behind it; set gateway.backendTls.caConfigMap",
    f"{GATEWAY},gateway.grpc=false,gateway.http=false": "routes nothing",
    f"{GATEWAY},router.httpPort=0": "set router.httpPort, or gateway.http",
    "gateway.inferencePool.enabled=true": "needs gateway.enabled and gateway.http",
    f"{GATEWAY},gateway.inferencePool.enabled=true": "needs endpointPicker.name",
    "serving.visibilities[0]=deep": 'serving.visibilities: "deep" is none; known are full, speed:DEPTH',
    "images.router.tag=latest": "images.router.tag is latest",
    "images.worker.tag=latest": "or set images.worker.digest",
    "autoscaling.ttftS=0": "autoscaling.ttftS is 0 and must be more than 0 seconds",
    "pools.prefill.resources.limits.memory=8Gi": "pools.prefill.resources.requests.memory is 16Gi and limits.memory is 8Gi",
    "pools.prefill.resources.limits.memory=16": "limits.memory is 16: no pod may ask for more than its limit",
    "ray.head.resources.requests.memory=32Gi": "ray.head.resources.requests.memory is 32Gi and limits.memory is 4Gi",
    "controller.resources.limits.cpu=400m": "controller.resources.requests.cpu is 500m and limits.cpu is 400m",
    "serving.threadsPerWorker=5": "serving.threadsPerWorker is 5 and pools.decode.resources.limits.cpu is 4",
    "router.grpcPort=9400": "router.grpcPort is 9400, which is the port of metrics (fixed)",
    "router.grpcPort=50054": "the port of health (fixed)",
    "router.httpPort=50051": "router.httpPort is 50051, which is the port of router.grpcPort",
    "router.httpPort=9400": "router.httpPort is 9400, which is the port of metrics",
    "router.httpPort=50054": "router.httpPort is 50054, which is the port of health",
    "pools.decode.minReplicas=9": "pools.decode.minReplicas 9 exceeds maxReplicas 8",
    "model.name=llama": 'model.name is "llama" and the images embed smollm2-135m alone',
    "model.adapter.path=mine": "model.source embedded has none: choose pvc, oci or hubCache",
    "model.adapter.anyVisibility=true": "model.adapter.path is empty",
    "promptImages.maxImagesMB=10": "promptImages.maxImageMB is 20 and maxImagesMB, for all files of a request, 10",
    "router.httpMaxBodyMB=8": "router.httpMaxBodyMB is 8 and an image of promptImages.maxImageMB, 20, takes 26.7 in base64",
    "router.httpMaxBodyMB=27": "and 1 for its prompt: set it to 28, or lower maxImageMB",
    "quality.minAgreement=1": "quality.shadowRate is 0: set it",
    "quality.shadowRate=1,serving.visibilities={full}": "must hold full and another",
    "quality.minSamples=201": "quality.minSamples 201 exceeds window 200",
    "autoscaling.profile.configMap=p,autoscaling.enabled=false": "autoscaling.profile.configMap needs autoscaling.enabled",
    "monitoring.dashboardLabel=": 'monitoring.dashboardLabel "" is no name of a label',
    "monitoring.runbookBaseURL=docs": 'monitoring.runbookBaseURL "docs" must be the address',
    "tracing.endpoint=collector:4318": 'tracing.endpoint "collector:4318" needs its scheme',
    "tracing.endpoint=http://collector:4318": "networkPolicy.collectorPorts is empty",
    "networkPolicy.apiServerCIDR=10.0.0.1": 'networkPolicy.apiServerCIDR "10.0.0.1" is no CIDR',
    "tls.certManager.duration=90d": 'tls.certManager.duration "90d" is no duration of hours',
    "tls.certManager.duration=30m": "below 1h, the least that cert-manager takes",
    "tls.certManager.renewBefore=2160h": "tls.certManager.renewBefore 2160h must be shorter than duration 2160h",
    "fullnameOverride=A": "lower-case letters",
    "fullnameOverride=shoal-of-the-very-long-names-that-no-operator-can-take": "at most 50",
}  # fmt: skip
BY_SCHEMA = {  # the two majors word these differently: the value's name must be in both
    "pools.prefill.replicas=0": "replicas",
    "pools.decode.replicas=-1": "replicas",
    "router.replicas=0": "replicas",
    "serving.dtype=float16": "dtype",
    "serving.visibilities=null": "visibilities",
    "serving.kvMemory=lots": "kvMemory",
    "tls.mode=maybe": "mode",
    "transfer.heartbeatS=61": "heartbeatS",
    "images.worker.digest=sha256:12": "digest",
    "router.grpcPort=70000": "grpcPort",
    "pools.prefil.replicas=2": "prefil",
    "tsl.mode=none": "tsl",
    "serving.maxRequests=many": "maxRequests",
    "pools.decode.resources.limits.cpu=abc": "cpu",
    "router.resources.requests.memory=1GB": "memory",
    "quality.shadowRate=1.5": "shadowRate",
    "promptImages.maxImages=-1": "maxImages",
    "promptImages.maxImageMB=21": "maxImageMB",
    "promptImages.maxImagesMB=201": "maxImagesMB",
    "promptImages.maxImageMegapixels=0": "maxImageMegapixels",
    "router.httpMaxBodyMB=0": "httpMaxBodyMB",
}


@pytest.mark.parametrize("given", CASES)
def test_contradictions_end_with_a_sentence(given: str, helm: str) -> None:
    with pytest.raises(RenderError) as refused:
        render_text(helm, "--set", given)
    assert CASES[given] in str(refused.value)
    assert "nil pointer" not in str(refused.value) and "wrong type" not in str(refused.value)


@pytest.mark.parametrize("given", ["promptImages.maxImages=0", "router.httpPort=0", "promptImages.maxImageMB=5"])
def test_a_small_body_is_enough_without_large_images_over_http(given: str, helm: str) -> None:
    assert "http-max-body-mb=28" not in render_text(helm, "--set", f"{given},router.httpMaxBodyMB=8")


@pytest.mark.parametrize("given", BY_SCHEMA)
def test_what_the_schema_refuses(given: str, helm: str) -> None:
    with pytest.raises(RenderError) as refused:
        render_text(helm, "--set", given)
    assert BY_SCHEMA[given] in str(refused.value)
