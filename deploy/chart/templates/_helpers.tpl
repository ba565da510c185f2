{{- define "thinwire.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "thinwire.selector" -}}
app.kubernetes.io/name: thinwire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "thinwire.labels" -}}
{{ include "thinwire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: thinwire
{{- end -}}

{{- define "thinwire.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "thinwire.jobs.namespace" -}}
{{ .Values.kuberay.namespace | default .Release.Namespace }}
{{- end -}}

{{- define "thinwire.claim" -}}
{{ .Values.home.existingClaim | default (printf "%s-home" (include "thinwire.name" .)) }}
{{- end -}}

{{/* What no schema can say: each sentence tells what to do. */}}
{{- define "thinwire.checks" -}}
{{- $v := .Values -}}
{{- if gt (int $v.replicas) 1 -}}
{{- if not $v.database.secret.name -}}
{{- fail (printf "replicas: %d needs PostgreSQL: SQLite has one service. Set database.secret.name, or replicas: 1" (int $v.replicas)) -}}
{{- end -}}
{{- if not $v.tokenSecret.name -}}
{{- fail (printf "replicas: %d needs tokenSecret.name: else each replica would make a token of its own" (int $v.replicas)) -}}
{{- end -}}
{{- if ne $v.home.accessMode "ReadWriteMany" -}}
{{- fail (printf "replicas: %d needs home.accessMode: ReadWriteMany: all of them mount the run folders" (int $v.replicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.launcher "ray") (not $v.ray.address) -}}
{{- fail "launcher: ray needs ray.address, the cluster's dashboard such as http://head.namespace:8265" -}}
{{- end -}}
{{- if and (ne $v.launcher "ray") $v.ray.address -}}
{{- fail (printf "ray.address: %s is of launcher: ray, and launcher is %s" $v.ray.address $v.launcher) -}}
{{- end -}}
{{- if $v.kuberay.template -}}
{{- $job := fromYaml $v.kuberay.template -}}
{{- if ne (get $job "kind" | toString) "RayJob" -}}
{{- fail (printf "kuberay.template must be one RayJob as text (--set-file kuberay.template=FILE), its kind is %s" (get $job "kind" | default "missing" | toString)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.checkpoints.claim (eq $v.launcher "kuberay") (not (contains (printf "claimName: %s" $v.checkpoints.claim) $v.kuberay.template)) -}}
{{- fail (printf "checkpoints.claim: %s is mounted by no pod: kuberay.template must have a volume with claimName: %s" $v.checkpoints.claim $v.checkpoints.claim) -}}
{{- end -}}
{{- if $v.ingress.enabled -}}
{{- if or (not $v.ingress.host) (not $v.ingress.tlsSecret) -}}
{{- fail "ingress.enabled needs ingress.host and ingress.tlsSecret: a token must not travel in clear" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.ingress.controllerNamespace) -}}
{{- fail "ingress.enabled needs ingress.controllerNamespace: the network policy lets nobody else in" -}}
{{- end -}}
{{- end -}}
{{- range $name := list "serviceMonitor" "scrapeConfig" -}}
{{- if and (get $v.monitoring $name) (not $v.tokenSecret.name) -}}
{{- fail (printf "monitoring.%s needs tokenSecret.name: Prometheus sends the operator's token" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $v.env -}}
{{- if has $name (list "THINWIRE_HOME" "THINWIRE_HOST" "THINWIRE_PORT" "THINWIRE_LAUNCHER" "THINWIRE_PUBLIC_URL" "THINWIRE_OPERATOR_TOKEN_FROM" "THINWIRE_DATABASE_URL" "THINWIRE_PACKAGES_FOLDER" "THINWIRE_SHARED_FOLDERS" "THINWIRE_RAY_ADDRESS" "THINWIRE_RAY_TOKEN_FILE" "THINWIRE_KUBERAY_NAMESPACE" "THINWIRE_KUBERAY_TEMPLATE" "THINWIRE_KUBERAY_IMAGE") -}}
{{- fail (printf "env: %s is set by the chart, from a value of its own" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
