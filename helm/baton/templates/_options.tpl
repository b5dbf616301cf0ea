{{/* What a container of Baton is called with. */}}

{{/* A map of options in camelCase as arguments. A number that YAML read as a float is written as it was meant. */}}
{{- define "baton.options" -}}
{{- range $name, $value := . }}
{{- $flag := kebabcase $name }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
{{- if $value }}
- --{{ $flag }}
{{- else if has $name (list "chunkedPrefill" "prefixCaching" "allowCredentials" "ui" "switching") }}
- --no-{{ $flag }}
{{- end }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- --{{ $flag }}
- {{ . | toString | quote }}
{{- end }}
{{- else }}
- --{{ $flag }}
- {{ include "baton.text" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The model as services are told of it: a directory that the init container filled, or what values say. */}}
{{- define "baton.modelPath" -}}
{{- if .Values.model.download.enabled }}/models/{{ .Values.model.name | replace "/" "--" }}-{{ .Values.model.download.revision | replace "/" "--" }}
{{- else }}{{ .Values.model.name }}{{ end }}
{{- end }}

{{- define "baton.model" -}}
- --model
- {{ include "baton.modelPath" . | quote }}
{{- $served := .Values.model.servedName }}
{{- if and .Values.model.download.enabled (not $served) }}{{ $served = .Values.model.name }}{{ end }}
{{- with $served }}
- --served-model-name
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "baton.workersTlsOptions" -}}
{{- if .Values.tls.workers.enabled }}
- --worker-tls-certfile
- /etc/baton/tls/workers/tls.crt
- --worker-tls-keyfile
- /etc/baton/tls/workers/tls.key
- --worker-tls-ca-certs
- /etc/baton/tls/workers/ca.crt
- --worker-tls-server-name
- {{ include "baton.workersServerName" . | quote }}
{{- end }}
{{- end }}

{{/* (root, role): a role's own go before those of all workers; false is a value too, which `merge` would lose. */}}
{{- define "baton.workerOptions" -}}
{{- $options := deepCopy (default (dict) .root.Values.workers.options) }}
{{- range $name, $value := (index .root.Values .role).options }}{{ $_ := set $options $name $value }}{{ end }}
{{- toJson $options }}
{{- end }}

{{/* (root, role): arguments of a worker. */}}
{{- define "baton.workerArgs" -}}
{{- $values := .root.Values }}
{{- $worker := index $values .role }}
{{- $options := include "baton.workerOptions" . | fromJson }}
{{- if $values.workers.simulated.enabled }}
- worker-sim
- --role
- {{ .role }}
- --profile
- {{ $values.workers.simulated.profile | quote }}
{{- range $values.workers.simulated.faults }}
- --fault
- {{ . | quote }}
{{- end }}
{{- with $values.workers.simulated.revision }}
- --revision
- {{ . | quote }}
{{- end }}
{{- else }}
- {{ .role }}
{{- end }}
{{ include "baton.model" .root }}
- --host
- $(POD_IP)
- --port
- {{ $values.workers.ports.grpc | toString | quote }}
- --metrics-port
- {{ $values.workers.ports.metrics | toString | quote }}
- --drain-timeout
- {{ $worker.drainTimeoutSeconds | toString | quote }}
{{- if gt (int $worker.tensorParallelSize) 1 }}
- --tensor-parallel-size
- {{ $worker.tensorParallelSize | toString | quote }}
{{- end }}
{{- if gt (int $worker.pipelineParallelSize) 1 }}
- --pipeline-parallel-size
- {{ $worker.pipelineParallelSize | toString | quote }}
{{- end }}
{{- if gt (int $worker.nodesPerWorker) 1 }}
- --nodes
- {{ $worker.nodesPerWorker | toString | quote }}
- --node-port
- {{ $values.workers.ports.nodes | toString | quote }}
- --join-timeout
- {{ $worker.startupSeconds | toString | quote }}
{{- end }}
{{- if and $worker.gpu.enabled (not (hasKey $options "device")) }}
- --device
- cuda
{{- end }}
{{- if and $worker.rdma.enabled (not $values.workers.simulated.enabled) (not (hasKey $options "requireRdma")) }}
- --require-rdma
{{- end }}
{{- include "baton.workersTlsOptions" .root }}
{{- include "baton.options" $options }}
{{- with $worker.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, role): arguments of a worker's other nodes. The rest the leader tells them, and LeaderWorkerSet who leads. */}}
{{- define "baton.nodeArgs" -}}
{{- $values := .root.Values }}
- node
- --host
- $(POD_IP)
- --node-port
- {{ $values.workers.ports.nodes | toString | quote }}
- --health-port
- {{ $values.workers.ports.metrics | toString | quote }}
- --join-timeout
- {{ (index $values .role).startupSeconds | toString | quote }}
{{- end }}

{{/* Arguments of the router. */}}
{{- define "baton.routerArgs" -}}
{{- $router := .Values.router }}
- router
{{ include "baton.model" . }}
- --host
- {{ $router.host | quote }}
- --port
- {{ $router.ports.http | toString | quote }}
- --grpc-port
- {{ $router.ports.grpc | toString | quote }}
- --drain-timeout
- {{ $router.drainTimeoutSeconds | toString | quote }}
{{- if eq $router.discovery "kubernetes" }}
- --discovery
- kubernetes
- --kubernetes-namespace
- $(POD_NAMESPACE)
- --kubernetes-selector
- {{ printf "baton.dev/role,app.kubernetes.io/instance=%s" .Release.Name | quote }}
{{- else }}
{{- range $router.workers }}
- --worker
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if include "baton.hasApiKeys" . }}
- --api-keys
- /etc/baton/keys/{{ .Values.apiKeys.key }}
{{- end }}
{{- if eq .Values.redis.mode "bundled" }}
- --redis-url
- {{ printf "redis://%s-redis:6379/0" (include "baton.fullname" .) | quote }}
{{- else if eq .Values.redis.mode "external" }}
- --redis-url
- {{ .Values.redis.url | quote }}
{{- end }}
{{- if .Values.tls.clients.enabled }}
- --ssl-certfile
- /etc/baton/tls/clients/tls.crt
- --ssl-keyfile
- /etc/baton/tls/clients/tls.key
{{- if eq .Values.tls.clients.clientAuth "required" }}
- --ssl-ca-certs
- /etc/baton/tls/clients/ca.crt
- --ssl-client-auth
- required
{{- end }}
{{- end }}
{{- include "baton.workersTlsOptions" . }}
{{- include "baton.options" $router.options }}
{{- with $router.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Arguments of the planner. */}}
{{- define "baton.plannerArgs" -}}
{{- $planner := .Values.planner }}
- planner
- --prometheus-url
- {{ default .Values.autoscaling.prometheus.serverAddress $planner.prometheusUrl | quote }}
- --ttft-target-ms
- {{ $planner.ttftTargetMs | toString | quote }}
- --itl-target-ms
- {{ $planner.itlTargetMs | toString | quote }}
- --gpu-budget
- {{ $planner.gpuBudget | toString | quote }}
{{- range $role := list "prefill" "decode" }}
{{- $worker := index $.Values $role }}
- --{{ $role }}-gpus
- {{ mul $worker.tensorParallelSize $worker.pipelineParallelSize | toString | quote }}
- --{{ $role }}-deployment
- {{ include "baton.fullname" $ }}-{{ $role }}
{{- end }}
- --kubernetes-namespace
- {{ include "baton.namespace" . }}
- --kubernetes-selector
- baton.dev/role,app.kubernetes.io/instance={{ .Release.Name }}
- --host
- $(POD_IP)
- --metrics-port
- {{ $planner.metricsPort | toString | quote }}
{{- if not (hasKey (default (dict) $planner.options) "prometheusSelector") }}
- --prometheus-selector
- {{ include "baton.seriesLabels" . | trim | squote }}
{{- end }}
{{- if $planner.dryRun }}
- --dry-run
{{- end }}
{{- include "baton.workersTlsOptions" . }}
{{- include "baton.options" $planner.options }}
{{- with $planner.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
