{{/* What the pods of all components share. */}}

{{/* (root, component, values): where and how a pod runs. */}}
{{- define "baton.placement" -}}
{{- $values := .values }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if kindIs "slice" $values.topologySpreadConstraints }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else }}
topologySpreadConstraints:
  {{- range .spread }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* (root, values, metricsPort): a pod's annotations. No port: there is nothing to scrape. */}}
{{- define "baton.podAnnotations" -}}
{{- $scrape := dict }}
{{- if and .root.Values.metrics.annotations .metricsPort }}
{{- $scrape = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .metricsPort) "prometheus.io/path" "/metrics" }}
{{- if .https }}{{ $_ := set $scrape "prometheus.io/scheme" "https" }}{{ end }}
{{- end }}
{{- with merge (dict) (default (dict) .values.podAnnotations) $scrape (default (dict) .root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.clusterKeys" -}}
- name: BATON_CLUSTER_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "baton.clusterKeySecret" . }}
      key: {{ .Values.clusterKey.key }}
{{- with include "baton.previousKey" . | fromJson }}
- name: BATON_CLUSTER_KEY_PREVIOUS
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
      optional: true
{{- end }}
{{- end }}

{{/* The environment of every container of Baton. The root is read-only: caches go where they can be written. */}}
{{- define "baton.environment" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{ include "baton.clusterKeys" . }}
- name: HOME
  value: /var/cache/baton
- name: BATON_CACHE_DIR
  value: /var/cache/baton/kernels
- name: TRITON_CACHE_DIR
  value: /var/cache/baton/triton
- name: HF_HOME
  value: /models/huggingface
{{- if .Values.model.download.enabled }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else if .Values.model.hubToken.existingSecret }}
{{ include "baton.hubToken" . }}
{{- end }}
{{- end }}

{{- define "baton.hubToken" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hubToken.existingSecret }}
      key: {{ .Values.model.hubToken.key }}
{{- end }}

{{/* (root, values, scratch) */}}
{{- define "baton.volumes" -}}
{{- $root := .root }}
- name: tmp
  emptyDir: {sizeLimit: {{ .scratch }}}
- name: cache
  emptyDir: {sizeLimit: {{ .scratch }}}
{{- with $root.Values.model.cache }}
- name: models
  {{- if eq .type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "baton.fullname" $root)) .existingClaim }}
    {{- if .readOnly }}
    readOnly: true
    {{- end }}
  {{- else if eq .type "hostPath" }}
  hostPath: {path: {{ .hostPath | quote }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {sizeLimit: {{ .sizeLimit }}}
  {{- end }}
{{- end }}
{{- if $root.Values.tls.workers.enabled }}
- name: workers-tls
  secret: {secretName: {{ include "baton.workersTlsSecret" $root }}, defaultMode: 0440}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, values) */}}
{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/baton}
- name: models
  mountPath: /models
  {{- if .root.Values.model.cache.readOnly }}
  readOnly: true
  {{- end }}
{{- if .root.Values.tls.workers.enabled }}
- {name: workers-tls, mountPath: /etc/baton/tls/workers, readOnly: true}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, values, image, weights): fetches the model, and leaves what is there already. */}}
{{- define "baton.initContainers" -}}
{{- $root := .root }}
{{- $download := $root.Values.model.download }}
{{- if or $download.enabled .values.initContainers }}
initContainers:
  {{- if $download.enabled }}
  - name: download
    image: {{ .image }}
    imagePullPolicy: {{ default $root.Values.image.pullPolicy .values.image.pullPolicy }}
    command: [tini, --, hf, download]
    args:
      - {{ $root.Values.model.name | quote }}
      - --revision
      - {{ $download.revision | quote }}
      - --local-dir
      - {{ include "baton.modelPath" $root | quote }}
      {{- $files := list "*.json" "*.jinja" "*.model" "*.txt" }}
      {{- if .weights }}{{ $files = append $files "*.safetensors" }}{{ end }}
      {{- range $files }}
      - --include
      - {{ . | quote }}
      {{- end }}
      - --exclude
      - "*/*"
      - --exclude
      - "consolidated*"
    env:
      - {name: HOME, value: /var/cache/baton}
      - {name: HF_HOME, value: /models/huggingface}
      {{- if $root.Values.model.hubToken.existingSecret }}
      {{- include "baton.hubToken" $root | nindent 6 }}
      {{- end }}
      {{- /* A way to the hub: proxies, another HF_ENDPOINT, an authority of one's own. */}}
      {{- with .values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .values.envFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $download.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- toYaml $root.Values.router.securityContext | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /var/cache/baton}
      - {name: models, mountPath: /models}
      {{- with .values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- end }}
  {{- with .values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* A Deployment's strategy. Kubernetes refuses `rollingUpdate`, which has defaults, beside another type. */}}
{{- define "baton.strategy" -}}
{{- $kept := default (dict) . }}
{{- if eq (default "" $kept.type) "Recreate" }}{{ $kept = omit $kept "rollingUpdate" }}{{ end }}
{{- toYaml $kept }}
{{- end }}

{{/* (values, startup, readiness, liveness): the startup budget is a number of seconds. */}}
{{- define "baton.probes" -}}
startupProbe:
  {{- .startup | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ ceil (divf .values.startupSeconds 5.0) }}
readinessProbe:
  {{- .readiness | nindent 2 }}
  {{- with .values.probes.readiness }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
livenessProbe:
  {{- .liveness | nindent 2 }}
  {{- with .values.probes.liveness }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* `sleep` as a command, not as an action: that one is younger than Kubernetes 1.28. */}}
{{- define "baton.lifecycle" -}}
{{- if .preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .preStopSeconds | toString | quote }}]
{{- end }}
{{- end }}

{{/* What a pod gets after SIGTERM: preStop, its drain, and what ending takes (a worker is gone 5 s later). */}}
{{- define "baton.grace" -}}
{{- add .preStopSeconds .drainTimeoutSeconds 10 }}
{{- end }}

{{/* (values) */}}
{{- define "baton.disruption" -}}
{{- if not (kindIs "invalid" .minAvailable) }}
minAvailable: {{ .minAvailable }}
{{- else }}
maxUnavailable: {{ .maxUnavailable }}
{{- end }}
{{- end }}
