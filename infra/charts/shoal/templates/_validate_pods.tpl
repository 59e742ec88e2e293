{{/* What Kubernetes would refuse of pods, ports, names and certificates, each with a sentence that says what to change. */}}

{{/* A Kubernetes quantity as a number: 500m is 0.500, 2Gi 2147483648.000. */}}
{{- define "shoal.quantity" -}}
{{- $text := toString . -}}
{{- if not (kindIs "string" .) }}{{ $text = printf "%.3f" (float64 .) }}{{ end -}}
{{- $steps := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- printf "%.3f" (mulf (regexFind "^[0-9.]+" $text | float64) (get $steps (regexFind "[a-zA-Z]+$" $text) | float64)) -}}
{{- end -}}

{{/* Seconds of 2160h, 1h30m, 45s. */}}
{{- define "shoal.seconds" -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+[hms]" . -1 -}}
{{- $sum = addf $sum (mulf (regexFind "[0-9.]+" . | float64) (get (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .))) -}}
{{- end -}}
{{- printf "%.3f" $sum -}}
{{- end -}}

{{- define "shoal.validatePods" -}}
{{- $v := .Values -}}
{{- $resources := dict "pools.prefill" $v.pools.prefill.resources "pools.decode" $v.pools.decode.resources "ray.head" $v.ray.head.resources "router" $v.router.resources "controller" $v.controller.resources -}}
{{- range $whose, $of := $resources -}}
{{- range $what, $limit := $of.limits -}}
{{- $request := get $of.requests $what -}}
{{- if and (hasKey $of.requests $what) (gt (include "shoal.quantity" $request | float64) (include "shoal.quantity" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v and limits.%s is %v: no pod may ask for more than its limit; raise the limit or lower the request" $whose $what $request $what $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $pool, $of := $v.pools -}}
{{- if gt (float64 $v.serving.threadsPerWorker) (include "shoal.quantity" $of.resources.limits.cpu | float64) -}}
{{- fail (printf "serving.threadsPerWorker is %d and pools.%s.resources.limits.cpu is %v: threads beyond the limit wait for each other; lower the one or raise the other" (int $v.serving.threadsPerWorker) $pool $of.resources.limits.cpu) -}}
{{- end -}}
{{- end -}}

{{- $taken := dict "50054" "health (fixed)" "9400" "metrics (fixed)" -}}
{{- range $door := list "grpcPort" "httpPort" -}}
{{- $port := int (get $v.router $door) -}}
{{- if $port -}}
{{- with get $taken (toString $port) -}}
{{- fail (printf "router.%s is %d, which is the port of %s in the same pod: choose another" $door $port .) -}}
{{- end -}}
{{- $_ := set $taken (toString $port) (printf "router.%s" $door) -}}
{{- end -}}
{{- end -}}

{{- range $image := list "router" "worker" -}}
{{- if eq (get $v.images $image).tag "latest" -}}
{{- fail (printf "images.%s.tag is latest, under which pods of one release may run different code: name a version, or set images.%s.digest" $image $image) -}}
{{- end -}}
{{- end -}}

{{- if and $v.monitoring.enabled $v.monitoring.dashboards (not (regexMatch "^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" $v.monitoring.dashboardLabel)) -}}
{{- fail (printf "monitoring.dashboardLabel %q is no name of a label: Grafana's sidecar finds dashboards by it, as in grafana_dashboard; or set monitoring.dashboards to false" $v.monitoring.dashboardLabel) -}}
{{- end -}}
{{- if and $v.monitoring.runbookBaseURL (not (regexMatch "^https?://[^ '\"#]+$" $v.monitoring.runbookBaseURL)) -}}
{{- fail (printf "monitoring.runbookBaseURL %q must be the address under which docs/ is published, as in https://docs.example.com/shoal" $v.monitoring.runbookBaseURL) -}}
{{- end -}}

{{- if and $v.model.adapter.path (eq $v.model.source "embedded") -}}
{{- fail (printf "model.adapter.path %q is a folder of the model's volume and model.source embedded has none: choose pvc, oci or hubCache" $v.model.adapter.path) -}}
{{- end -}}
{{- if and $v.model.adapter.anyVisibility (not $v.model.adapter.path) -}}
{{- fail "model.adapter.anyVisibility speaks of an adapter and model.adapter.path is empty: set the one or leave out the other" -}}
{{- end -}}
{{- if and $v.autoscaling.profile.configMap (not (and $v.autoscaling.enabled $v.autoscaling.profile.key)) -}}
{{- fail "autoscaling.profile.configMap needs autoscaling.enabled and profile.key: the controller alone reads that file" -}}
{{- end -}}
{{- $i := $v.promptImages -}}
{{- if and $i.maxImages (gt (float64 $i.maxImageMB) (float64 $i.maxImagesMB)) -}}
{{- fail (printf "promptImages.maxImageMB is %v and maxImagesMB, for all files of a request, %v: no file that large could come; lower the one or raise the other" $i.maxImageMB $i.maxImagesMB) -}}
{{- end -}}
{{- $body := addf 1 (divf (mulf 4 $i.maxImageMB) 3) -}}
{{- if and $i.maxImages $v.router.httpPort (lt (float64 $v.router.httpMaxBodyMB) $body) -}}
{{- fail (printf "router.httpMaxBodyMB is %v and an image of promptImages.maxImageMB, %v, takes %.1f in base64 and 1 for its prompt: set it to %.0f, or lower maxImageMB" $v.router.httpMaxBodyMB $i.maxImageMB (subf $body 1) (ceil $body)) -}}
{{- end -}}
{{- $q := $v.quality -}}
{{- if and (or $q.minAgreement $q.maxKl) (not $q.shadowRate) -}}
{{- fail "quality.minAgreement and maxKl judge replays and quality.shadowRate is 0: set it, as in 0.05, or leave the bounds out" -}}
{{- end -}}
{{- if and $q.shadowRate (or (not (has "full" $v.serving.visibilities)) (lt (len $v.serving.visibilities) 2)) -}}
{{- fail (printf "quality.shadowRate compares shallow answers with full depth: serving.visibilities (%s) must hold full and another" (join ", " $v.serving.visibilities)) -}}
{{- end -}}
{{- if gt (int $q.minSamples) (int $q.window) -}}
{{- fail (printf "quality.minSamples %d exceeds window %d: nothing would ever be judged" (int $q.minSamples) (int $q.window)) -}}
{{- end -}}

{{- with $v.tracing.endpoint -}}
{{- if not (regexMatch "^https?://[^/ ]+" .) -}}
{{- fail (printf "tracing.endpoint %q needs its scheme: OTLP over HTTP, as in http://collector.monitoring.svc:4318" .) -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.collectorPorts) -}}
{{- fail (printf "tracing.endpoint is %q and networkPolicy.collectorPorts is empty: the NetworkPolicy shoal-services would close the way to it; list the collector's port there, as in [4318]" .) -}}
{{- end -}}
{{- end -}}

{{- if and $v.networkPolicy.enabled $v.autoscaling.enabled (not (regexMatch "^(([0-9]{1,3}\\.){3}[0-9]{1,3}/([12]?[0-9]|3[0-2])|[0-9a-fA-F:]*:[0-9a-fA-F:.]*/([0-9]{1,2}|1[01][0-9]|12[0-8]))$" $v.networkPolicy.apiServerCIDR)) -}}
{{- fail (printf "networkPolicy.apiServerCIDR %q is no CIDR: an address with the length of its prefix, as in 10.96.0.1/32" $v.networkPolicy.apiServerCIDR) -}}
{{- end -}}

{{- if eq $v.tls.mode "certManager" -}}
{{- range $what := list "duration" "renewBefore" -}}
{{- $value := get $v.tls.certManager $what -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?[hms])+$" $value) -}}
{{- fail (printf "tls.certManager.%s %q is no duration of hours, minutes and seconds, as in 2160h or 1h30m (there are no days)" $what $value) -}}
{{- end -}}
{{- end -}}
{{- if lt (include "shoal.seconds" $v.tls.certManager.duration | float64) 3600.0 -}}
{{- fail (printf "tls.certManager.duration %s is below 1h, the least that cert-manager takes" $v.tls.certManager.duration) -}}
{{- end -}}
{{- if ge (include "shoal.seconds" $v.tls.certManager.renewBefore | float64) (include "shoal.seconds" $v.tls.certManager.duration | float64) -}}
{{- fail (printf "tls.certManager.renewBefore %s must be shorter than duration %s: certificates would be renewed without end" $v.tls.certManager.renewBefore $v.tls.certManager.duration) -}}
{{- end -}}
{{- end -}}
{{- end -}}
