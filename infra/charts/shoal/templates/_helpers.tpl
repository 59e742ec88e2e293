{{/* Names, labels, images and the parts that several pods share. */}}

{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name $name }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What selects pods: (dict "root" $ "component" "router"); without a component, all of them. */}}
{{- define "shoal.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: shoal
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* `image:` and `imagePullPolicy:`: (dict "root" $ "image" .Values.images.router) */}}
{{- define "shoal.image" -}}
{{- $tag := .image.tag -}}
{{- if not $tag }}{{ $tag = .root.Chart.AppVersion }}{{ with .image.variant }}{{ $tag = printf "%s-%s" $tag . }}{{ end }}{{ end -}}
image: {{ if .image.digest }}{{ printf "%s@%s" .image.repository .image.digest }}{{ else }}{{ printf "%s:%s" .image.repository $tag }}{{ end }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end -}}

{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A path or a known name, as every process is told it. */}}
{{- define "shoal.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "embedded" -}}
{{- $model.name -}}
{{- else if eq $model.source "pvc" -}}
{{- printf "/models/%s" (trimPrefix "/" $model.pvc.path) | trimSuffix "/" -}}
{{- else if eq $model.source "oci" -}}
{{- printf "/models/%s" (trimPrefix "/" $model.oci.path) | trimSuffix "/" -}}
{{- else -}}
{{- printf "/models/models--%s/snapshots/%s" ($model.hubCache.repository | replace "/" "--") $model.hubCache.revision -}}
{{- end -}}
{{- end -}}

{{/* The allow-list with the default first, comma separated. */}}
{{- define "shoal.visibilities" -}}
{{- $default := .Values.serving.defaultVisibility -}}
{{- prepend (without .Values.serving.visibilities $default) $default | join "," -}}
{{- end -}}

{{- define "shoal.hasTls" -}}
{{- if ne .Values.tls.mode "none" }}yes{{ end -}}
{{- end -}}

{{- define "shoal.clusterTlsSecret" -}}
{{- if eq .Values.tls.mode "secrets" }}{{ .Values.tls.cluster.secretName }}{{ else }}{{ include "shoal.fullname" . }}-cluster-tls{{ end -}}
{{- end -}}

{{- define "shoal.doorTlsSecret" -}}
{{- if eq .Values.tls.mode "secrets" }}{{ .Values.tls.door.secretName }}{{ else }}{{ include "shoal.fullname" . }}-door-tls{{ end -}}
{{- end -}}

{{/* A name that the doors' certificate has. */}}
{{- define "shoal.doorName" -}}
{{- if .Values.tls.certManager.doorIssuerRef }}{{ first .Values.tls.door.dnsNames }}{{ else }}{{ include "shoal.fullname" . }}-router.{{ .Release.Namespace }}.svc{{ end -}}
{{- end -}}

{{- define "shoal.rayTokenSecret" -}}
{{- .Values.ray.authSecret | default (include "shoal.fullname" .) -}}
{{- end -}}

{{- define "shoal.rayHead" -}}
{{- printf "%s-head-svc.%s.svc" (include "shoal.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* Volumes that router, controller and workers have. */}}
{{- define "shoal.volumes" -}}
- name: cluster-secret
  secret:
    secretName: {{ .Values.clusterSecret.name }}
    defaultMode: 0440
    items:
      - key: secret
        path: secret
{{- if include "shoal.hasTls" . }}
- name: cluster-tls
  secret:
    secretName: {{ include "shoal.clusterTlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName }}
    readOnly: true
{{- else if eq .Values.model.source "hubCache" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.hubCache.claimName }}
    readOnly: true
{{- else if eq .Values.model.source "oci" }}
- name: model
  image:
    reference: {{ .Values.model.oci.reference }}
    pullPolicy: {{ .Values.model.oci.pullPolicy }}
{{- end }}
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "shoal.mounts" -}}
- name: cluster-secret
  mountPath: /etc/shoal/cluster
  readOnly: true
{{- if include "shoal.hasTls" . }}
- name: cluster-tls
  mountPath: /etc/shoal/cluster-tls
  readOnly: true
{{- end }}
{{- if ne .Values.model.source "embedded" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
{{- end -}}

{{/* Environment of every Shoal process. */}}
{{- define "shoal.env" -}}
- name: HF_HUB_OFFLINE
  value: "1"
- name: HOME
  value: /tmp
{{- with .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "shoal.podIp" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}

{{/* Where a pod may go: a map with nodeSelector, tolerations, affinity, priorityClassName. */}}
{{- define "shoal.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The three probes of a process with --health-listen. */}}
{{- define "shoal.probes" -}}
startupProbe:
  grpc: {port: 50054, service: shoal.live}
  periodSeconds: 5
  failureThreshold: {{ .startup }}
livenessProbe:
  grpc: {port: 50054, service: shoal.live}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  grpc: {port: 50054}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{/* Flags and the rest of a container of `helm test`. */}}
{{- define "shoal.testFlags" -}}
{{- if .Values.tls.certManager.doorIssuerRef }}
- --tls
- --tls-name={{ first .Values.tls.door.dnsNames }}
{{- else if include "shoal.hasTls" . }}
- --tls-ca=/etc/shoal/door-tls/ca.crt
{{- if .Values.tls.door.requireClientCert }}
- --tls-cert=/etc/shoal/door-tls/tls.crt
- --tls-key=/etc/shoal/door-tls/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.testPod" -}}
{{ include "shoal.image" (dict "root" $ "image" .Values.images.router) }}
env:
  - name: HOME
    value: /tmp
  {{- if and .Values.tokens.secretName .Values.tests.tokenSecret.name }}
  - name: SHOAL_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ .Values.tests.tokenSecret.name }}
        key: {{ .Values.tests.tokenSecret.key }}
  {{- end }}
resources:
  requests: {cpu: 100m, memory: 256Mi}
  limits: {cpu: 500m, memory: 256Mi}
securityContext:
  {{- include "shoal.containerSecurity" . | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- if include "shoal.hasTls" . }}
  - name: door-tls
    mountPath: /etc/shoal/door-tls
    readOnly: true
  {{- end }}
{{- end -}}

{{/* How Prometheus reads one endpoint. */}}
{{- define "shoal.scrape" -}}
interval: {{ .Values.monitoring.interval }}
path: /metrics
{{- if include "shoal.hasTls" . }}
{{- $secret := printf "%s-prometheus-tls" (include "shoal.fullname" .) }}
{{- if eq .Values.tls.mode "secrets" }}{{ $secret = .Values.monitoring.tlsSecret | default .Values.tls.cluster.secretName }}{{ end }}
scheme: https
tlsConfig:
  serverName: shoal-cluster
  ca: {secret: {name: {{ $secret }}, key: ca.crt}}
  cert: {secret: {name: {{ $secret }}, key: tls.crt}}
  keySecret: {name: {{ $secret }}, key: tls.key}
{{- end }}
{{- end -}}

{{/* Bytes of 512MiB, 4Gi, 1073741824, …; decimal units count as binary ones. */}}
{{- define "shoal.bytes" -}}
{{- $text := toString . -}}
{{- if not (kindIs "string" .) }}{{ $text = printf "%.0f" (float64 .) }}{{ end -}}
{{- $steps := dict "" 1 "K" 1024 "M" 1048576 "G" 1073741824 "T" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $steps (regexFind "[KMGTkmgt]" $text | upper)) | int64 -}}
{{- end -}}
