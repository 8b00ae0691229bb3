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
