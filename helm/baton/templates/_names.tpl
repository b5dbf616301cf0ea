{{/* Names, labels and images. */}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 45 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{- define "baton.namespace" -}}{{ .Release.Namespace }}{{- end }}

{{/* (root, component): what selects a component's pods. Of the release, so that two of them never mix. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* What selects the release's series: PodMonitors, and scrapers that map the labels of pods, give them both. */}}
{{- define "baton.seriesLabels" -}}
namespace={{ include "baton.namespace" . | quote }},app_kubernetes_io_instance={{ .Release.Name | quote }}
{{- end }}

{{/* (root, component) */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, component, name, annotations): an object's metadata. */}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ default (include "baton.namespace" .root) .namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) (default (dict) .root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, image, variant): a role's image; what it does not say is as `image` says, and its variant. */}}
{{- define "baton.image" -}}
{{- $registry := default .root.Values.image.registry .image.registry }}
{{- $common := default .root.Chart.AppVersion .root.Values.image.tag }}
{{- $tag := default (printf "%s%s" $common (default "" .variant)) .image.tag }}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "baton.routerImage" -}}
{{- include "baton.image" (dict "root" . "image" .Values.router.image) }}
{{- end }}

{{/* (root, role): the workers' image has two builds. What simulates is in the router's, which has no torch. */}}
{{- define "baton.workerImage" -}}
{{- $worker := index .root.Values .role }}
{{- if .root.Values.workers.simulated.enabled }}{{ include "baton.routerImage" .root }}
{{- else }}{{- include "baton.image" (dict "root" .root "image" $worker.image "variant" (ternary "-cuda" "-cpu" $worker.gpu.enabled)) }}
{{- end }}
{{- end }}

{{/* The roles that there are, with spaces between. */}}
{{- define "baton.roles" -}}
{{- range list "prefill" "decode" "both" }}{{ if (index $.Values .).enabled }}{{ . }} {{ end }}{{ end }}
{{- end }}

{{- define "baton.routerAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (printf "%s-router" (include "baton.fullname" .)) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "baton.plainAccount" -}}
{{- if .Values.serviceAccount.create }}{{ include "baton.fullname" . }}-plain
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "baton.plannerAccount" -}}
{{- if .Values.serviceAccount.create }}{{ include "baton.fullname" . }}-planner
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* "yes" if it is the planner that says how many pods of prefill and decode there are. */}}
{{- define "baton.plannerScales" -}}
{{- if and .Values.planner.enabled (not .Values.planner.dryRun) }}yes{{ end }}
{{- end }}

{{- define "baton.clusterKeySecret" -}}
{{- default (printf "%s-cluster-key" (include "baton.fullname" .)) .Values.clusterKey.existingSecret }}
{{- end }}

{{/* The Secret, and the key in it, of the cluster key before this one, as JSON. Unless one is named, it is the one that running
routers have, if that is another: pods of both run until they are all replaced. Otherwise the Secret itself may have it. */}}
{{- define "baton.previousKey" -}}
{{- $current := include "baton.clusterKeySecret" . }}
{{- $found := dict "name" $current "key" (printf "%s-previous" .Values.clusterKey.key) }}
{{- if .Values.clusterKey.previousSecret }}
{{- $found = dict "name" .Values.clusterKey.previousSecret "key" .Values.clusterKey.key }}
{{- else }}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-router" (include "baton.fullname" .)) | default (dict) }}
{{- range dig "spec" "template" "spec" "containers" (list) $live }}
{{- range .env }}
{{- $running := dig "valueFrom" "secretKeyRef" (dict) . }}
{{- if and (eq .name "BATON_CLUSTER_KEY") $running.name (ne $running.name $current) }}
{{- $found = dict "name" $running.name "key" $running.key }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Annotations of what is drawn once: Helm keeps it where it is no longer rendered, as what runs still asks for it. */}}
{{- define "baton.keptAnnotations" -}}
{"helm.sh/resource-policy": "keep"}
{{- end }}

{{/* (root, kind, name): an object that Helm keeps for this release, as JSON; {} if there is none. It goes on being rendered
where values no longer ask for it: `helm rollback` adopts nothing, and would fail at a revision that has it. */}}
{{- define "baton.kept" -}}
{{- $live := lookup "v1" .kind .root.Release.Namespace .name | default (dict) }}
{{- $annotations := dig "metadata" "annotations" (dict) $live | default (dict) }}
{{- $ours := eq (get $annotations "meta.helm.sh/release-name") .root.Release.Name }}
{{- if and $ours (eq (get $annotations "helm.sh/resource-policy") "keep") }}{{ toJson $live }}{{ else }}{}{{ end }}
{{- end }}

{{/* (root, name, key, length, kept): the data of a Secret of the chart's own. What is kept stays as it is. Otherwise the key
is drawn once, and then the same from one release to the next: pods of both must agree while they overlap. */}}
{{- define "baton.drawn" -}}
{{- if .kept }}{{ toYaml .kept.data }}
{{- else }}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .name | default (dict) }}
{{- .key }}: {{ dig "data" .key "" $live | default (randAlphaNum (int .length) | b64enc) }}
{{- end }}
{{- end }}

{{/* (root, field, secret): refuse a Secret of the user's that is the chart's own. Helm would delete it, as it is no longer
rendered, if an older chart made it, which did not have it kept; the ring would be down with its next restart. */}}
{{- define "baton.refuseOwnSecret" -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .secret }}
{{- $annotations := dig "metadata" "annotations" (dict) (default (dict) $live) | default (dict) }}
{{- $labels := dig "metadata" "labels" (dict) (default (dict) $live) | default (dict) }}
{{- $ours := and (eq (get $labels "app.kubernetes.io/managed-by") "Helm") (eq (get $annotations "meta.helm.sh/release-name") .root.Release.Name) }}
{{- if and $ours (ne (get $annotations "helm.sh/resource-policy") "keep") }}
{{- fail (printf "%s: %s is the Secret that this release made, and Helm would delete it; make one of another name, with the same key in it" .field .secret) }}
{{- end }}
{{- end }}

{{- define "baton.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "baton.fullname" .)) .Values.apiKeys.existingSecret }}
{{- end }}
{{- define "baton.hasApiKeys" -}}
{{- if or .Values.apiKeys.existingSecret .Values.apiKeys.inline }}yes{{ end }}
{{- end }}

{{- define "baton.redisSecret" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecret }}
{{- else if eq .Values.redis.mode "bundled" }}{{ include "baton.fullname" . }}-redis{{ end }}
{{- end }}

{{- define "baton.clientsTlsSecret" -}}
{{- default (printf "%s-clients-tls" (include "baton.fullname" .)) .Values.tls.clients.existingSecret }}
{{- end }}
{{- define "baton.workersTlsSecret" -}}
{{- default (printf "%s-workers-tls" (include "baton.fullname" .)) .Values.tls.workers.existingSecret }}
{{- end }}
{{- define "baton.workersServerName" -}}
{{- default (printf "%s-worker" (include "baton.fullname" .)) .Values.tls.workers.serverName }}
{{- end }}

{{/* Of a duration with one unit, such as 15s. None: 0. */}}
{{- define "baton.milliseconds" -}}
{{- $text := default "" . }}
{{- $unit := regexFind "[a-z]+$" $text }}
{{- mul (trimSuffix $unit $text | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) }}
{{- end }}

{{/* (root, enabled, api): "yes" if what needs a cluster to know `api` is to be rendered. */}}
{{- define "baton.wanted" -}}
{{- if eq (toString .enabled) "auto" }}{{ if .root.Capabilities.APIVersions.Has .api }}yes{{ end }}
{{- else if .enabled }}yes{{ end }}
{{- end }}
