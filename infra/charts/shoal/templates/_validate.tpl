{{/* Values that contradict each other end here, each with a sentence that says what to change. Types and ranges: the schema. */}}
{{- define "shoal.validate" -}}
{{- $v := .Values -}}
{{- $name := include "shoal.fullname" . -}}
{{- if or (gt (len $name) 50) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "the name %q must be at most 50 lower-case letters, digits and hyphens, beginning with a letter: KubeRay makes longer ones of it; set fullnameOverride" $name) -}}
{{- end -}}

{{- range $v.serving.visibilities -}}
{{- if not (regexMatch "^(full|speed:[0-9]+(:anchors=[0-9]+)?(:sink)?|pop:[0-9]+(:late)?)$" (toString .)) -}}
{{- fail (printf "serving.visibilities: %q is none; known are full, speed:DEPTH with :anchors=N and :sink, pop:DEPTH with :late, as in speed:22" (toString .)) -}}
{{- end -}}
{{- end -}}
{{- if not (has $v.serving.defaultVisibility $v.serving.visibilities) -}}
{{- fail (printf "serving.defaultVisibility %q is not among serving.visibilities (%s): add it there, or choose one of them" $v.serving.defaultVisibility (join ", " $v.serving.visibilities)) -}}
{{- end -}}
{{- range $v.serving.visibilities -}}
{{- $depth := regexFind "[0-9]+" . | default "1" | atoi -}}
{{- if lt $depth 1 -}}
{{- fail (printf "serving.visibilities: %q runs prompts through no layer; the depth must be at least 1" .) -}}
{{- end -}}
{{- if and (gt (int $v.model.numLayers) 0) (gt $depth (int $v.model.numLayers)) -}}
{{- fail (printf "serving.visibilities: %q is deeper than the model, which has %d layers (model.numLayers): lower the depth, or correct model.numLayers" . (int $v.model.numLayers)) -}}
{{- end -}}
{{- end -}}

{{- if and (eq $v.model.source "embedded") (not $v.model.name) -}}
{{- fail "model.source embedded needs model.name, one that `shoal models` lists" -}}
{{- end -}}
{{- if and (eq $v.model.source "embedded") (ne $v.model.name "smollm2-135m") -}}
{{- fail (printf "model.name is %q and the images embed smollm2-135m alone: give other models by model.source pvc, oci or hubCache" $v.model.name) -}}
{{- end -}}
{{- if and (eq $v.model.source "pvc") (not $v.model.pvc.claimName) -}}
{{- fail "model.source pvc needs model.pvc.claimName: the PersistentVolumeClaim that holds the model" -}}
{{- end -}}
{{- if and (eq $v.model.source "oci") (not (regexMatch "(:[^/]+|@sha256:[0-9a-f]{64})$" $v.model.oci.reference)) -}}
{{- fail (printf "model.source oci needs model.oci.reference with a tag or a digest, as in registry.example.com/models/llama:v1; it is %q" $v.model.oci.reference) -}}
{{- end -}}
{{- if eq $v.model.source "hubCache" -}}
{{- if or (not $v.model.hubCache.claimName) (not (regexMatch "^[^/]+/[^/]+$" $v.model.hubCache.repository)) (not (regexMatch "^[0-9a-f]{40}$" $v.model.hubCache.revision)) -}}
{{- fail "model.source hubCache needs model.hubCache.claimName, repository (as in HuggingFaceTB/SmolLM2-135M-Instruct) and revision (a commit of 40 hex digits: a branch would change under running workers)" -}}
{{- end -}}
{{- end -}}

{{- range $pool, $of := $v.pools -}}
{{- if gt (int $of.minReplicas) (int $of.maxReplicas) -}}
{{- fail (printf "pools.%s.minReplicas %d exceeds maxReplicas %d" $pool (int $of.minReplicas) (int $of.maxReplicas)) -}}
{{- end -}}
{{- if or (lt (int $of.replicas) (int $of.minReplicas)) (gt (int $of.replicas) (int $of.maxReplicas)) -}}
{{- fail (printf "pools.%s.replicas is %d and must lie within minReplicas and maxReplicas, %d…%d" $pool (int $of.replicas) (int $of.minReplicas) (int $of.maxReplicas)) -}}
{{- end -}}
{{- if and (eq $v.transfer.backend "nccl") (eq (int $of.gpus) 0) -}}
{{- fail (printf "transfer.backend nccl moves KV between GPUs and pools.%s.gpus is 0: give every worker of both pools a GPU, or set transfer.backend to gloo" $pool) -}}
{{- end -}}
{{- if and (eq $v.transfer.backend "gloo") (gt (int $of.gpus) 0) -}}
{{- fail (printf "transfer.backend gloo runs workers on CPUs: the %d GPUs of pools.%s.gpus would stand idle; set transfer.backend to nccl, or gpus to 0" (int $of.gpus) $pool) -}}
{{- end -}}
{{- if gt (int $of.gpus) 1 -}}
{{- fail (printf "pools.%s.gpus is %d and a worker uses one GPU: ask for more workers (replicas) instead" $pool (int $of.gpus)) -}}
{{- end -}}
{{- if and (eq (int $of.gpus) 0) (ge (include "shoal.bytes" $v.serving.kvMemory | int64) (include "shoal.bytes" $of.resources.limits.memory | int64)) -}}
{{- fail (printf "serving.kvMemory %v does not fit pools.%s.resources.limits.memory %v, which on CPUs holds KV, weights and the process: lower the one or raise the other" $v.serving.kvMemory $pool $of.resources.limits.memory) -}}
{{- end -}}
{{- if ne (gt (int $of.rdma.count) 0) (ne $of.rdma.resource "") -}}
{{- fail (printf "pools.%s.rdma needs both resource (the device plugin's name) and count, or neither" $pool) -}}
{{- end -}}
{{- if and (gt (int $of.rdma.count) 0) (ne $v.transfer.backend "nccl") -}}
{{- fail (printf "pools.%s.rdma has no effect with transfer.backend %s: only nccl uses RDMA" $pool $v.transfer.backend) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.transfer.backend "nccl") (eq $v.images.worker.variant "cpu") (not $v.images.worker.tag) (not $v.images.worker.digest) -}}
{{- fail "images.worker.variant cpu holds no CUDA and transfer.backend is nccl: set the variant to cuda, or the backend to gloo" -}}
{{- end -}}

{{- range $what := list "ttftS" "tpotS" -}}
{{- if and $v.autoscaling.enabled (le (float64 (get $v.autoscaling $what)) 0.0) -}}
{{- fail (printf "autoscaling.%s is %v and must be more than 0 seconds: no number of workers answers in none; autoscaling.enabled false turns it off" $what (get $v.autoscaling $what)) -}}
{{- end -}}
{{- end -}}
{{- if le (int $v.router.drainS) (int $v.transfer.leaseS) -}}
{{- fail (printf "router.drainS is %d and must be longer than transfer.leaseS, %d: else a router ends while a handoff that it started still holds its lease" (int $v.router.drainS) (int $v.transfer.leaseS)) -}}
{{- end -}}
{{- if gt (int $v.router.autoscaling.minReplicas) (int $v.router.autoscaling.maxReplicas) -}}
{{- fail (printf "router.autoscaling.minReplicas %d exceeds maxReplicas %d" (int $v.router.autoscaling.minReplicas) (int $v.router.autoscaling.maxReplicas)) -}}
{{- end -}}

{{- if not $v.clusterSecret.name -}}
{{- fail "clusterSecret.name is empty: make the Secret by which the cluster's processes know each other (kubectl create secret generic shoal-cluster-secret --from-literal=secret=$(openssl rand -hex 32)) and name it" -}}
{{- end -}}
{{- if eq $v.tls.mode "secrets" -}}
{{- if or (not $v.tls.door.secretName) (not $v.tls.cluster.secretName) -}}
{{- fail "tls.mode secrets is half configured: it needs tls.door.secretName (tls.crt, tls.key) and tls.cluster.secretName (tls.crt, tls.key, ca.crt)" -}}
{{- end -}}
{{- if $v.tls.door.dnsNames -}}
{{- fail "tls.door.dnsNames are for certificates that cert-manager makes: with tls.mode secrets the given certificate says its names; leave them out" -}}
{{- end -}}
{{- else if or $v.tls.door.secretName $v.tls.cluster.secretName -}}
{{- fail (printf "tls.door.secretName or tls.cluster.secretName is given and tls.mode is %s, which would not use it: set tls.mode to secrets, or leave them out" $v.tls.mode) -}}
{{- end -}}
{{- if and $v.tls.certManager.doorIssuerRef (or (ne $v.tls.mode "certManager") (not $v.tls.door.dnsNames)) -}}
{{- fail "tls.certManager.doorIssuerRef needs tls.mode certManager and tls.door.dnsNames: such an issuer signs no names inside the cluster unless you list them" -}}
{{- end -}}
{{- if and (eq $v.tls.mode "none") (or $v.tls.door.requireClientCert $v.tls.door.dnsNames) -}}
{{- fail "tls.door.requireClientCert and dnsNames need TLS and tls.mode is none: choose certManager or secrets, or leave them out" -}}
{{- end -}}
{{- if and (eq $v.tls.mode "none") $v.tokens.secretName -}}
{{- fail "tokens.secretName asks callers for tokens and tls.mode is none: whoever is on the way would read them; choose certManager or secrets" -}}
{{- end -}}

{{- if $v.gateway.enabled -}}
{{- if not $v.gateway.parentRefs -}}
{{- fail "gateway.enabled needs gateway.parentRefs: the Gateways that the routes attach to" -}}
{{- end -}}
{{- if not (or $v.gateway.grpc $v.gateway.http) -}}
{{- fail "gateway.enabled routes nothing while gateway.grpc and gateway.http are both false" -}}
{{- end -}}
{{- if and $v.gateway.http (eq (int $v.router.httpPort) 0) -}}
{{- fail "gateway.http needs the router's HTTP door: set router.httpPort, or gateway.http to false" -}}
{{- end -}}
{{- if and (ne $v.tls.mode "none") (not $v.gateway.backendTls.caConfigMap) -}}
{{- fail "the router's doors have TLS: the Gateway must be told whom to trust behind it; set gateway.backendTls.caConfigMap, or tls.mode to none" -}}
{{- end -}}
{{- end -}}
{{- if $v.gateway.inferencePool.enabled -}}
{{- if not (and $v.gateway.enabled $v.gateway.http) -}}
{{- fail "gateway.inferencePool needs gateway.enabled and gateway.http: an HTTPRoute leads to it" -}}
{{- end -}}
{{- if not $v.gateway.inferencePool.endpointPicker.name -}}
{{- fail "gateway.inferencePool needs endpointPicker.name: the Service of the endpoint picker" -}}
{{- end -}}
{{- end -}}

{{- include "shoal.validatePods" . -}}

{{- if lookup "v1" "Namespace" "" .Release.Namespace -}}{{/* a live cluster: what the values name must be there */}}
{{- $ns := .Release.Namespace -}}
{{- if and (eq $v.model.source "oci") (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source oci mounts an image as a volume, which Kubernetes does from 1.33 on, and this cluster is %s: choose pvc or hubCache" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $secrets := list $v.clusterSecret.name $v.tls.door.secretName $v.tls.cluster.secretName $v.tokens.secretName $v.ray.authSecret -}}
{{- range compact $secrets -}}
{{- if not (lookup "v1" "Secret" $ns .) -}}
{{- fail (printf "the Secret %q is missing in namespace %s; docs/kubernetes.md says how to make it" . $ns) -}}
{{- end -}}
{{- end -}}
{{- $kinds := dict "ray.io/v1" "KubeRay" -}}
{{- if eq $v.tls.mode "certManager" }}{{ $_ := set $kinds "cert-manager.io/v1" "cert-manager (or set tls.mode)" }}{{ end -}}
{{- if $v.monitoring.enabled }}{{ $_ := set $kinds "monitoring.coreos.com/v1" "the Prometheus operator (or set monitoring.enabled to false)" }}{{ end -}}
{{- if $v.gateway.enabled }}{{ $_ := set $kinds "gateway.networking.k8s.io/v1" "the Gateway API (or set gateway.enabled to false)" }}{{ end -}}
{{- range $api, $what := $kinds -}}
{{- if not ($.Capabilities.APIVersions.Has $api) -}}
{{- fail (printf "this cluster knows no %s: install %s first" $api $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
