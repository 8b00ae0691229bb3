{{- define "plimsoll.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "plimsoll.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "plimsoll.labels" -}}
{{ include "plimsoll.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "plimsoll.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "plimsoll.claim" -}}
{{- .Values.cache.existingClaim | default (printf "%s-cache" (include "plimsoll.name" .)) -}}
{{- end -}}

{{/* "true" where the chart's own volume can be mounted by one node at a time. */}}
{{- define "plimsoll.volumeOfOneNode" -}}
{{- if and .Values.cache.enabled (not .Values.cache.existingClaim) (not (has "ReadWriteMany" .Values.cache.accessModes)) -}}
true
{{- end -}}
{{- end -}}

{{- define "plimsoll.strategy" -}}
{{- if .Values.strategy -}}
{{ toYaml .Values.strategy }}
{{- else if include "plimsoll.volumeOfOneNode" . -}}
type: Recreate
{{- else -}}
type: RollingUpdate
{{- end -}}
{{- end -}}

{{/* "true" where `helm test` can tell: it compares one server's counters before and after, and speaks plain HTTP. */}}
{{- define "plimsoll.hasSelftest" -}}
{{- if and (not .Values.tlsSecret) (not .Values.autoscaling.enabled) (eq (int .Values.replicas) 1) -}}
true
{{- end -}}
{{- end -}}

{{/* What the pod was given. The server is told, as it would serve on the CPU where a GPU that it should have is not there. */}}
{{- define "plimsoll.device" -}}
{{- if and (gt (int .Values.gpus) 0) (ne (int .Values.gpus) (int .Values.tensorParallelSize)) -}}
{{- fail (printf "gpus is %d and tensorParallelSize %d: a server uses as many GPUs as it has ranks" (int .Values.gpus) (int .Values.tensorParallelSize)) -}}
{{- end -}}
{{- $device := ternary "cuda" "cpu" (gt (int .Values.gpus) 0) -}}
{{- range $name, $_ := .Values.resources.limits -}}
{{- if hasPrefix "nvidia.com/" $name }}{{ $device = "cuda" }}{{ end -}}
{{- end -}}
{{ $device }}
{{- end -}}

{{- define "plimsoll.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "plimsoll.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "plimsoll.kvEvents" -}}
{{- $endpoint := printf "tcp://*:%d" (int .Values.kvEvents.port) -}}
{{- $replay := printf "tcp://*:%d" (int .Values.kvEvents.replayPort) -}}
{{- $topic := printf "kv@$(POD_IP):8000@%s" (.Values.kvEvents.model | default .Values.model) -}}
--kv-events-config={{ dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" $endpoint "replay_endpoint" $replay "topic" $topic | toJson }}
{{- end -}}

{{- define "plimsoll.scheme" -}}
{{- if .Values.tlsSecret }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{/* Settings that values make too: with another meaning, probes and grace period would not fit the server any more. */}}
{{- define "plimsoll.checkSettings" -}}
{{- $instead := dict "model" "model" "device" "gpus" "port" "service.port" "ssl-certfile" "tlsSecret" "ssl-keyfile" "tlsSecret" -}}
{{- range list "drain-timeout" "shutdown-timeout" }}{{ $_ := set $instead . "drainTimeout" }}{{ end -}}
{{- range list "tensor-parallel-size" "tp-size" "tp" }}{{ $_ := set $instead . "tensorParallelSize" }}{{ end -}}
{{- if .Values.kvEvents.enabled }}{{ $_ := set $instead "kv-events-config" "kvEvents" }}{{ end -}}
{{- if .Values.apiKeySecret }}{{ $_ := set $instead "api-key-file" "apiKeySecret" }}{{ end -}}
{{- $given := dict -}}
{{- range .Values.args -}}
{{- $flag := (split "=" .)._0 -}}
{{- if or (hasPrefix "--" $flag) (eq $flag "-tp") }}{{ $_ := set $given $flag (trimAll "-" $flag) }}{{ end -}}
{{- end -}}
{{- range .Values.env -}}
{{- if hasPrefix "PLIMSOLL_" .name }}{{ $_ := set $given .name (trimPrefix "PLIMSOLL_" .name | lower) }}{{ end -}}
{{- end -}}
{{- range $written, $name := $given -}}
{{- with get $instead (replace "_" "-" $name) }}{{ fail (printf "%s is set by the value %s" $written .) }}{{ end -}}
{{- end -}}
{{- end -}}
