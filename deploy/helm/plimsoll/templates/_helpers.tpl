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

{{/* Flags that values set too: with another meaning, probes and grace period would not fit the server any more. */}}
{{- define "plimsoll.checkArgs" -}}
{{- $instead := dict "port" "service.port" "drain-timeout" "drainTimeout" "shutdown-timeout" "drainTimeout" "ssl-certfile" "tlsSecret" "ssl-keyfile" "tlsSecret" "model" "model" -}}
{{- if .Values.kvEvents.enabled }}{{ $_ := set $instead "kv-events-config" "kvEvents" }}{{ end -}}
{{- if .Values.apiKeySecret }}{{ $_ := set $instead "api-key-file" "apiKeySecret" }}{{ end -}}
{{- range .Values.args -}}
{{- $name := (split "=" .)._0 | trimPrefix "--" | replace "_" "-" -}}
{{- if and (hasPrefix "--" .) (hasKey $instead $name) -}}
{{- fail (printf "args: %s is set by the value %s" . (get $instead $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
