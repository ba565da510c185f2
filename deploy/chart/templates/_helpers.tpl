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

{{/* KubeRay lets the autoscaler of each job change all pods of its namespace: by default not those of the service. */}}
{{- define "thinwire.jobs.namespace" -}}
{{- $apart := and (eq .Values.launcher "kuberay") (not .Values.kuberay.sharedNamespace) -}}
{{ .Values.kuberay.namespace | default (ternary (printf "%s-jobs" .Release.Namespace) .Release.Namespace $apart) }}
{{- end -}}

{{/* All namespaces of jobs, each once. */}}
{{- define "thinwire.jobs.all" -}}
{{- $of := ternary (values .Values.kuberay.namespaces) list (eq .Values.launcher "kuberay") -}}
{{ concat (list (include "thinwire.jobs.namespace" . | trim)) $of | uniq | sortAlpha | toJson }}
{{- end -}}

{{/* The service as pods reach it. */}}
{{- define "thinwire.url" -}}
{{ ternary "https" "http" (ne .Values.tls.secret "") }}://{{ include "thinwire.name" . }}.{{ .Release.Namespace }}:{{ .Values.service.port }}
{{- end -}}

{{/* Of the Prometheus operator: how it trusts the service. */}}
{{- define "thinwire.tlsConfig" -}}
serverName: {{ (urlParse (.Values.publicUrl | default (include "thinwire.url" .))).hostname | quote }}
{{- with .Values.tls.ca }}
ca:
  secret: {name: {{ $.Values.tls.secret | quote }}, key: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Variables by which Python, requests, botocore and pip trust the CAs of caBundle. */}}
{{- define "thinwire.caEnv" -}}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "AWS_CA_BUNDLE" "PIP_CERT" }}
- {name: {{ . }}, value: /etc/thinwire/ca-bundle/ca.crt}
{{- end }}
{{- end -}}

{{- define "thinwire.caVolume" -}}
- name: ca-bundle
  configMap:
    name: {{ .configMap | quote }}
    items: [{key: {{ .key | quote }}, path: ca.crt}]
{{- end -}}

{{/* kuberay.pods as the launcher reads it. */}}
{{- define "thinwire.pods" -}}
{{- $pods := deepCopy .Values.kuberay.pods -}}
{{- if .Values.caBundle.configMap -}}
{{- $_ := set $pods "env" (concat (include "thinwire.caEnv" . | fromYamlArray) $pods.env) -}}
{{- $_ := set $pods "volumes" (concat (include "thinwire.caVolume" .Values.caBundle | fromYamlArray) $pods.volumes) -}}
{{- $mount := dict "name" "ca-bundle" "mountPath" "/etc/thinwire/ca-bundle" "readOnly" true -}}
{{- $_ := set $pods "volumeMounts" (concat (list $mount) $pods.volumeMounts) -}}
{{- end -}}
{{- if not $pods.priorityClassName -}}
{{- $_ := unset $pods "priorityClassName" -}}
{{- end -}}
{{ toYaml $pods }}
{{- end -}}

{{/* Rules of egress. */}}
{{- define "thinwire.dns" -}}
- to: {{- toYaml .Values.networkPolicy.egress.dns | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}

{{- define "thinwire.apiServer" -}}
- to: {{- toYaml .Values.networkPolicy.egress.apiServer | nindent 4 }}
  ports: {{- range .Values.networkPolicy.egress.apiServerPorts }}
    - {protocol: TCP, port: {{ . }}}{{ end }}
{{- end -}}

{{- define "thinwire.claim" -}}
{{ .Values.home.existingClaim | default (printf "%s-home" (include "thinwire.name" .)) }}
{{- end -}}

{{/* A quantity of Kubernetes as a number: 250m, 1.5, 2e3, 512Mi. What is none the schema has refused. */}}
{{- define "thinwire.amount" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][-+]?[0-9]+)?" $text -}}
{{- $two := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $ten := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- mulf (float64 $number) (get (merge $two $ten) (trimPrefix $number $text)) -}}
{{- end -}}

{{/* What no schema can say: each sentence tells what to do. */}}
{{- define "thinwire.checks" -}}
{{- $v := .Values -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release name %s cannot be that of a Service: begin with a letter; then letters, digits and dashes, no dots" .Release.Name) -}}
{{- end -}}
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
{{- range $name, $asked := $v.resources.requests -}}
{{- $most := get $v.resources.limits $name -}}
{{- if and (hasKey $v.resources.limits $name) (gt (include "thinwire.amount" $asked | float64) (include "thinwire.amount" $most | float64)) -}}
{{- fail (printf "resources.requests.%s: %v is above resources.limits.%s: %v, which no API server takes: raise the limit, or request less" $name $asked $name $most) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.launcher "ray") (not $v.ray.address) -}}
{{- fail "launcher: ray needs ray.address, the cluster's dashboard such as http://head.namespace:8265" -}}
{{- end -}}
{{- if and (ne $v.launcher "ray") $v.ray.address -}}
{{- fail (printf "ray.address: %s is of launcher: ray, and launcher is %s" $v.ray.address $v.launcher) -}}
{{- end -}}
{{- if and (eq $v.launcher "kuberay") (not $v.kuberay.sharedNamespace) (eq (include "thinwire.jobs.namespace" . | trim) .Release.Namespace) -}}
{{- fail (printf "kuberay.namespace: %s is that of the release, where the autoscaler of any job could change the pods of the service: name another, or set kuberay.sharedNamespace: true" .Release.Namespace) -}}
{{- end -}}
{{- range $project, $namespace := $v.kuberay.namespaces -}}
{{- if and (not $v.kuberay.sharedNamespace) (eq $namespace $.Release.Namespace) -}}
{{- fail (printf "kuberay.namespaces.%s: %s is that of the release, where the autoscaler of any job could change the pods of the service: name another, or set kuberay.sharedNamespace: true" $project $namespace) -}}
{{- end -}}
{{- end -}}
{{- if $v.kuberay.template -}}
{{- $job := fromYaml $v.kuberay.template -}}
{{- if ne (get $job "kind" | toString) "RayJob" -}}
{{- fail (printf "kuberay.template must be one RayJob as text (--set-file kuberay.template=FILE), its kind is %s" (get $job "kind" | default "missing" | toString)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.checkpoints.claim (eq $v.launcher "kuberay") (not (regexMatch (printf "claimName: *[\"']?%s[\"']?[ ,}]*(#.*)?(\n|$)" (regexQuoteMeta $v.checkpoints.claim)) $v.kuberay.template)) -}}
{{- fail (printf "checkpoints.claim: %s is mounted by no pod: kuberay.template must have a volume with claimName: %s" $v.checkpoints.claim $v.checkpoints.claim) -}}
{{- end -}}
{{- if and $v.checkpoints.claim $v.checkpoints.create (not $v.home.existingClaim) (eq $v.checkpoints.claim (include "thinwire.claim" .)) -}}
{{- fail (printf "checkpoints.claim: %s is the name of the claim of the service's home: jobs must not mount that; name another" $v.checkpoints.claim) -}}
{{- end -}}
{{- if and $v.tls.secret (hasPrefix "http:" $v.publicUrl) -}}
{{- fail (printf "publicUrl: %s is plain HTTP, and tls.secret makes the service speak TLS: begin it with https://" $v.publicUrl) -}}
{{- end -}}
{{- with $v.networkPolicy -}}
{{- if and .egress.enabled (not .enabled) -}}
{{- fail "networkPolicy.egress.enabled needs networkPolicy.enabled" -}}
{{- end -}}
{{- if and .egress.enabled (eq $v.launcher "kuberay") (not .egress.apiServer) -}}
{{- fail "networkPolicy.egress.enabled needs networkPolicy.egress.apiServer: the addresses of the API server, as `kubectl get endpoints kubernetes` prints them; service and autoscalers must reach it" -}}
{{- end -}}
{{- if and .egress.enabled $v.database.secret.name (not .egress.database) -}}
{{- fail "networkPolicy.egress.enabled needs networkPolicy.egress.database: where PostgreSQL is; the service must reach it" -}}
{{- end -}}
{{- range $name := list "THINWIRE_OIDC_ISSUER" "THINWIRE_OTLP_ENDPOINT" -}}
{{- if and $v.networkPolicy.egress.enabled (hasKey $v.env $name) (not $v.networkPolicy.egress.service) -}}
{{- fail (printf "env.%s with networkPolicy.egress.enabled needs a rule in networkPolicy.egress.service: the service must reach %s" $name (get $v.env $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := list "tmp" "data" "home" "tls" "template" "ray-token" "token" "ca-bundle" -}}
{{- range $v.extraVolumes -}}
{{- if has .name $own -}}
{{- fail (printf "extraVolumes: %s is a volume of the chart: name another" .name) -}}
{{- end -}}
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
{{- if and (get $v.monitoring $name) (not $v.monitoring.tokenSecret.name) -}}
{{- fail (printf "monitoring.%s needs monitoring.tokenSecret.name: a Secret with a token of the role viewer, as `thinwire token create prometheus --role viewer` prints one" $name) -}}
{{- end -}}
{{- if and (get $v.monitoring $name) (eq $v.monitoring.tokenSecret.name $v.tokenSecret.name) (eq $v.monitoring.tokenSecret.key $v.tokenSecret.key) -}}
{{- fail (printf "monitoring.tokenSecret: %s is the operator's token, which allows everything; make one of the role viewer for Prometheus" $v.tokenSecret.name) -}}
{{- end -}}
{{- end -}}
{{- $names := keys $v.env -}}
{{- range $v.extraEnv -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $name := $names | sortAlpha -}}
{{- if has $name (list "HOME" "PYTHONDONTWRITEBYTECODE" "THINWIRE_HOME" "THINWIRE_HOST" "THINWIRE_PORT" "THINWIRE_LAUNCHER" "THINWIRE_PUBLIC_URL" "THINWIRE_OPERATOR_TOKEN_FROM" "THINWIRE_DATABASE_URL" "THINWIRE_PACKAGES_FOLDER" "THINWIRE_SHARED_FOLDERS" "THINWIRE_RAY_ADDRESS" "THINWIRE_RAY_TOKEN_FILE" "THINWIRE_KUBERAY_NAMESPACE" "THINWIRE_KUBERAY_SHARED_NAMESPACE" "THINWIRE_KUBERAY_TEMPLATE" "THINWIRE_KUBERAY_IMAGE" "THINWIRE_KUBERAY_PODS" "THINWIRE_KUBERAY_NAMESPACES" "THINWIRE_KUBERAY_JOBS_APART" "THINWIRE_PEER_HOST" "POD_IP" "THINWIRE_TLS_CERTIFICATE" "THINWIRE_TLS_KEY" "THINWIRE_TLS_CA") -}}
{{- fail (printf "env: %s is set by the chart, from a value of its own" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
