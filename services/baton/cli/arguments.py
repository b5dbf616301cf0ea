"""The options of the commands, each with its help, declared once for all commands that take it.

An option's parameter is named like the field it fills, so that a command passes its parameters on as they
are. What a value must satisfy is checked by the configuration, which the services share with the command
line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.options import parse_size
from baton.worker.config import RoleName


def _size(text: str | int) -> int:
    try:
        return parse_size(str(text))  # a default is a number already
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_MODEL = "Model"
_MEMORY = "Memory and batching"
_SPECULATION = "Speculative decoding"
_PARALLEL = "Parallelism"
_PLACEMENT = "Placement"
_NETWORK = "Network"
_PROCESS = "Process"
_SIMULATED = "Simulation"
_TRACES = "Traces"

Model = Annotated[
    str,
    typer.Option(
        help="'demo' (the small model that comes with Baton), a Hugging Face model directory, or a hub id.",
        rich_help_panel=_MODEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="The name clients ask for. Default: the directory's own name, or what --model says.",
        rich_help_panel=_MODEL,
    ),
]
ServedModelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="The name clients ask for; give the option again for each other name. Default: the directory's "
        "own name, or what --model says.",
        rich_help_panel=_MODEL,
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Serve several models: a YAML or JSON list of {name, aliases, model, workers or "
        "kubernetes_selector}. The first is meant where a request names none.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: the type the weights were saved in, but float32 on a CPU "
        "that is slow with it.",
        rich_help_panel=_MODEL,
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="none, or int8: the weights of matmuls in half the memory, so that answers come faster and a "
        "little different. On a CPU with its kernels; the same on all workers of a ring.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (CUDA where there is one), cpu, cuda or cuda:N. The processes of a split model take N and "
        "those that follow.",
        rich_help_panel=_MODEL,
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda or cuda:N; several, as in cuda:0,cuda:1, are dealt out to the workers, "
        "to each as many as it has processes.",
        rich_help_panel=_MODEL,
    ),
]
LoadFormat = Annotated[
    str,
    typer.Option(
        help="auto, or dummy: random weights of the model's shape, to measure without a download.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus answer, in tokens. Default: what the model was made for.",
        rich_help_panel=_MODEL,
    ),
]

ToolCallParser = Annotated[
    str,
    typer.Option(
        help="How the model writes tool calls: hermes, llama3_json, none, or auto: as its template shows.",
        rich_help_panel=_MODEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="How the model marks its reasoning: think, deepseek_r1 (answers always begin inside), none, or "
        "auto: as its template shows.",
        rich_help_panel=_MODEL,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="Sampling fields that requests do not give: auto, as the model's generation_config.json says, "
        "or none, OpenAI's defaults.",
        rich_help_panel=_MODEL,
    ),
]

BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=_MEMORY)]
NumBlocks = Annotated[
    int | None,
    typer.Option(help="KV blocks per worker. Default: what the memory holds.", rich_help_panel=_MEMORY),
]
KvCacheMemory = Annotated[
    int | None,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="Memory for KV blocks per worker, such as 2GiB, instead of --num-blocks.",
        rich_help_panel=_MEMORY,
    ),
]
HostKvMemory = Annotated[
    int,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="Host memory per worker for KV blocks that the pool has no room for any more, such as 16GiB; "
        "they come back by copy. 0 keeps none.",
        rich_help_panel=_MEMORY,
    ),
]
MaxNumSeqs = Annotated[
    int, typer.Option(help="Most requests running at once on a worker.", rich_help_panel=_MEMORY)
]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Most tokens computed in one step.", rich_help_panel=_MEMORY)
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        help="Most prompt tokens of one request in one step; smaller disturbs running answers less.",
        rich_help_panel=_MEMORY,
    ),
]
MixedPrefillTokens = Annotated[
    int | None,
    typer.Option(
        help="Most prompt tokens of a step that decodes as well: running answers wait for them. Default: 64 "
        "on a CPU and 256 on CUDA for a decode worker, no limit of its own for the others.",
        rich_help_panel=_MEMORY,
    ),
]
ChunkedPrefill = Annotated[
    bool,
    typer.Option(
        help="Compute long prompts in chunks, between the steps of running answers.",
        rich_help_panel=_MEMORY,
    ),
]
PrefixCaching = Annotated[
    bool, typer.Option(help="Keep KV blocks for prompts that begin alike.", rich_help_panel=_MEMORY)
]
EnforceEager = Annotated[
    bool,
    typer.Option(
        "--enforce-eager",
        help="On CUDA, launch each kernel of a decode step by itself instead of replaying graphs.",
        rich_help_panel=_MEMORY,
    ),
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="fcfs: first come, first served. priority: requests with a lower priority field go first.",
        rich_help_panel=_MEMORY,
    ),
]
PriorityAging = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="With --scheduling-policy priority: how long a request waits to make up for one level.",
        rich_help_panel=_MEMORY,
    ),
]
SpeculativeMethod = Annotated[
    str,
    typer.Option(
        help="Who guesses tokens ahead, for one step to settle several: none, ngram (what followed the last "
        "tokens before), draft (a small model), medusa or eagle. Answers stay the same. Prefill workers take "
        "no notice.",
        rich_help_panel=_SPECULATION,
    ),
]
SpeculativeModel = Annotated[
    str | None,
    typer.Option(
        help="With draft, medusa or eagle: the directory, or hub id, of what they load. Default: the "
        "directory of the method's name inside the model's own, as the demo model has them.",
        rich_help_panel=_SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int, typer.Option(help="Most guesses per answer and step, 1 to 16.", rich_help_panel=_SPECULATION)
]
SpeculativeNgramMin = Annotated[
    int, typer.Option(help="With ngram: fewest last tokens to look for.", rich_help_panel=_SPECULATION)
]
SpeculativeNgramMax = Annotated[
    int, typer.Option(help="With ngram: most last tokens to look for.", rich_help_panel=_SPECULATION)
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        help="Processes, each with a device of its own, that share every layer's heads and rows.",
        rich_help_panel=_PARALLEL,
    ),
]
PipelineParallelSize = Annotated[
    int,
    typer.Option(
        help="Stages that the layers are dealt out to, one after the other, each of as many processes.",
        rich_help_panel=_PARALLEL,
    ),
]
Nodes = Annotated[
    int,
    typer.Option(
        help="Machines, or pods, that the processes of this worker are on: this one, which leads, and those "
        "on which `baton node` runs.",
        rich_help_panel=_PARALLEL,
    ),
]
NodesOfGroup = Annotated[
    int,
    typer.Option(
        "--nodes", envvar="LWS_GROUP_SIZE", help="As the leader's --nodes.", rich_help_panel=_PARALLEL
    ),
]
NodePort = Annotated[
    int,
    typer.Option(help="The leader's port at which the other nodes join.", rich_help_panel=_PARALLEL),
]
JoinTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Longest wait for the other nodes of a worker, or for its leader.",
        rich_help_panel=_PARALLEL,
    ),
]
LeaderAddress = Annotated[
    str,
    typer.Option(
        envvar="LWS_LEADER_ADDRESS", help="Host of the worker that leads.", rich_help_panel=_PARALLEL
    ),
]
NodeIndex = Annotated[
    int,
    typer.Option(
        envvar="LWS_WORKER_INDEX",
        help="Which node this is, from 1 on; the leader is 0.",
        rich_help_panel=_PARALLEL,
    ),
]
HealthPort = Annotated[
    int,
    typer.Option(
        help="HTTP port of /livez and /readyz; 0 picks one, -1 serves none.", rich_help_panel=_NETWORK
    ),
]
PrefillTensorParallelSize = Annotated[
    int | None,
    typer.Option(help="Of prefill workers. Default: --tensor-parallel-size.", rich_help_panel=_PARALLEL),
]
PrefillPipelineParallelSize = Annotated[
    int | None,
    typer.Option(help="Of prefill workers. Default: --pipeline-parallel-size.", rich_help_panel=_PARALLEL),
]
DecodeTensorParallelSize = Annotated[
    int | None,
    typer.Option(help="Of decode workers. Default: --tensor-parallel-size.", rich_help_panel=_PARALLEL),
]
DecodePipelineParallelSize = Annotated[
    int | None,
    typer.Option(help="Of decode workers. Default: --pipeline-parallel-size.", rich_help_panel=_PARALLEL),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads of a worker, or of each of its processes. Default: the library's choice, or the "
        "cores shared out to the processes.",
        rich_help_panel=_PROCESS,
    ),
]
ThreadsPerWorker = Annotated[
    int | None,
    typer.Option(
        help="CPU threads of each worker, or of each of its processes. Default: the cores, shared out.",
        rich_help_panel=_PROCESS,
    ),
]

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="Host that the router and other workers call. Default: --host, or this machine's name.",
        rich_help_panel=_NETWORK,
    ),
]
WorkerPort = Annotated[
    int, typer.Option(help="gRPC port for routers and other workers; 0 picks one.", rich_help_panel=_NETWORK)
]
MetricsPort = Annotated[
    int,
    typer.Option(help="HTTP port of /metrics; 0 picks one, -1 serves none.", rich_help_panel=_NETWORK),
]
VllmMetricNames = Annotated[
    bool,
    typer.Option(
        "--vllm-metric-names",
        help="Export metrics under vLLM's names (vllm:*) as well, for dashboards that were made for it.",
        rich_help_panel=_NETWORK,
    ),
]
SloTtft = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Count requests whose answers begin later than this as misses (baton_slo_requests_total), with "
        "the reason.",
        rich_help_panel="Targets",
    ),
]
SloItl = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Likewise those of which more than one token in a hundred comes later than this after the one "
        "before.",
        rich_help_panel="Targets",
    ),
]
DataPort = Annotated[
    int,
    typer.Option(
        help="Port that KV blocks arrive on (other connectors: those that follow); 0 picks.",
        rich_help_panel=_NETWORK,
    ),
]
Connector = Annotated[
    str,
    typer.Option(
        help="How KV blocks travel: auto (the best that both sides have), ucx, nccl, gloo or tcp.",
        rich_help_panel=_NETWORK,
    ),
]
VerifyHandoff = Annotated[
    bool,
    typer.Option(
        "--verify-handoff",
        help="Compare a checksum of every transfer of KV blocks; one that differs fails the handoff.",
        rich_help_panel=_NETWORK,
    ),
]
HandoffPatience = Annotated[
    float,
    typer.Option(
        help="Seconds that decode waits for a sign of life of one handoff on a healthy link.",
        rich_help_panel=_NETWORK,
    ),
]
HttpPort = Annotated[int, typer.Option(help="Port of the HTTP API; 0 picks one.", rich_help_panel=_NETWORK)]
GrpcPort = Annotated[
    int,
    typer.Option(help="Port of the gRPC API; 0 picks one, -1 serves none.", rich_help_panel=_NETWORK),
]
Processes = Annotated[
    int,
    typer.Option(
        help="Router processes that share the ports; one uses one core. Limits that Redis does not keep are "
        "shared out between them.",
        rich_help_panel=_NETWORK,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Let pages of this origin use the API from a browser; * is any. Give it once for each.",
        rich_help_panel=_NETWORK,
    ),
]
AllowCredentials = Annotated[
    bool, typer.Option(help="Let those pages send credentials.", rich_help_panel=_NETWORK)
]
AllowedMethods = Annotated[
    list[str] | None,
    typer.Option(metavar="METHOD", help="That those pages may use. Default: any.", rich_help_panel=_NETWORK),
]
AllowedHeaders = Annotated[
    list[str] | None,
    typer.Option(metavar="HEADER", help="That those pages may send. Default: any.", rich_help_panel=_NETWORK),
]
Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="HOST:PORT",
        help="A worker's gRPC address; give the option once for each worker.",
        rich_help_panel=_NETWORK,
    ),
]
_DISCOVERY = "Discovery"
Discovery = Annotated[
    str,
    typer.Option(
        help="How the router knows the workers: static (--worker), or kubernetes (EndpointSlices).",
        rich_help_panel=_DISCOVERY,
    ),
]
KubernetesNamespace = Annotated[
    str | None,
    typer.Option(
        help="Where the workers' Services are. Default: this pod's namespace, or default.",
        rich_help_panel=_DISCOVERY,
    ),
]
KubernetesSelector = Annotated[
    str,
    typer.Option(help="Label selector of the workers' EndpointSlices.", rich_help_panel=_DISCOVERY),
]
KubernetesPort = Annotated[
    str,
    typer.Option(help="Name of the gRPC port in the workers' Services.", rich_help_panel=_DISCOVERY),
]
Kubeconfig = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Credentials for the API server. Default: this pod's service account; outside of a cluster "
        "$KUBECONFIG or ~/.kube/config.",
        rich_help_panel=_DISCOVERY,
    ),
]
KubernetesContext = Annotated[
    str | None,
    typer.Option(help="The context of the kubeconfig. Default: its current one.", rich_help_panel=_DISCOVERY),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="BATON_REDIS_URL",
        show_default=False,
        metavar="URL",
        help="Where routers keep limits together: redis://HOST:PORT/DB, or rediss:// for TLS. "
        "Default: each router by itself.",
        rich_help_panel="Limits",
    ),
]
RedisPasswordFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Redis's password. Default: that in $BATON_REDIS_PASSWORD, else of the URL.",
        rich_help_panel="Limits",
    ),
]
RedisTimeoutMs = Annotated[
    float,
    typer.Option(
        metavar="MS", help="How long a request waits for Redis, up to 45 ms.", rich_help_panel="Limits"
    ),
]
LimitRequestsPerMinute = Annotated[
    int | None,
    typer.Option(
        help="Requests in any minute, of all clients together; with --api-keys, of each tenant that the file "
        "says nothing else of.",
        rich_help_panel="Limits",
    ),
]
LimitTokensPerMinute = Annotated[
    int | None,
    typer.Option(help="Tokens in any minute, read and written.", rich_help_panel="Limits"),
]
LimitConcurrentRequests = Annotated[
    int | None, typer.Option(help="Requests under way at once.", rich_help_panel="Limits")
]
LimitTokensPerDay = Annotated[int | None, typer.Option(help="Tokens in a UTC day.", rich_help_panel="Limits")]
DiscoveryMaxStaleness = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="The router is not ready when the set of workers was not confirmed for longer; 0: no bound.",
        rich_help_panel=_DISCOVERY,
    ),
]
ClusterKey = Annotated[
    str,
    typer.Option(
        envvar="BATON_CLUSTER_KEY",
        show_default=False,
        help="Secret that signs what one service may ask of another; the same for all. "
        "Better given in the environment, where no process list shows it.",
        rich_help_panel=_NETWORK,
    ),
]

_SECURITY = "Security"
ApiKeys = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="API keys (YAML or JSON; see `baton keys create`), read again when they change. "
        "Default: everybody may ask.",
        rich_help_panel=_SECURITY,
    ),
]
SslCertfile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Certificate chain (PEM) for TLS on HTTP and gRPC, read again when it changes.",
        rich_help_panel=_SECURITY,
    ),
]
SslKeyfile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Its private key (PEM).", rich_help_panel=_SECURITY)
]
SslCaCerts = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Who signs clients' certificates (PEM).", rich_help_panel=_SECURITY),
]
SslClientAuth = Annotated[
    str,
    typer.Option(
        help="none, or required: only clients with a certificate of --ssl-ca-certs connect (mTLS).",
        rich_help_panel=_SECURITY,
    ),
]
WorkerTlsCertfile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Certificate chain (PEM) of this service for mTLS between router and workers, and between "
        "workers. Read again for each connection.",
        rich_help_panel=_SECURITY,
    ),
]
WorkerTlsKeyfile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Its private key (PEM).", rich_help_panel=_SECURITY)
]
WorkerTlsCaCerts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Who signs the certificates of all services (PEM).", rich_help_panel=_SECURITY
    ),
]
WorkerTlsServerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The name that workers' certificates have. Default: the host they are called by.",
        rich_help_panel=_SECURITY,
    ),
]
AuditLog = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-",
        help="One line of JSON for each request, without its words; - for standard error.",
        rich_help_panel=_SECURITY,
    ),
]
AuditLogRequired = Annotated[
    bool,
    typer.Option(
        "--audit-log-required",
        help="Refuse requests with 503 while the audit log cannot be written.",
        rich_help_panel=_SECURITY,
    ),
]
LogPrompts = Annotated[
    bool,
    typer.Option(
        "--log-prompts",
        help="Write prompts to the audit log too, up to 4096 characters each.",
        rich_help_panel=_SECURITY,
    ),
]
Ui = Annotated[
    bool,
    typer.Option("--ui/--no-ui", help="Serve a live page at /ui.", rich_help_panel=_TRACES),
]
TraceRequests = Annotated[
    int,
    typer.Option(
        help="Requests that have ended and are kept for `baton explain`, the latest.",
        rich_help_panel=_TRACES,
    ),
]
TraceMemory = Annotated[
    int,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="Memory for them; those that ended first go.",
        rich_help_panel=_TRACES,
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send spans of requests to this OpenTelemetry collector: http://HOST:4317, OTLP over gRPC.",
        rich_help_panel=_TRACES,
    ),
]
TraceSample = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Of the requests whose traceparent does not say, those to send spans of: 0 to 1.",
        rich_help_panel=_TRACES,
    ),
]
MaxInflight = Annotated[
    int | None,
    typer.Option(
        help="Answers that may be under way at once; others wait their turn, in fair shares of the tenants. "
        "Default: what the workers say they run at once and a quarter more, and four for each prefill "
        "worker.",
        rich_help_panel="Limits",
    ),
]
QueueSize = Annotated[
    int,
    typer.Option(
        help="Requests that may wait their turn; those beyond are refused.", rich_help_panel="Limits"
    ),
]
QueueTokens = Annotated[
    int,
    typer.Option(help="Prompt tokens of all requests that wait their turn.", rich_help_panel="Limits"),
]
MaxQueueWait = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="A request that should wait its turn for more than 0.7 of this is refused at once; one that has "
        "waited for three times as long, after all.",
        rich_help_panel="Limits",
    ),
]
MaxStreamBacklog = Annotated[
    int,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="What a client may leave unread of a stream; beyond it the stream is cut.",
        rich_help_panel="Limits",
    ),
]
SlowClientTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="A client that reads nothing for so long while something is there for it is cut off.",
        rich_help_panel="Limits",
    ),
]

MaxBodyBytes = Annotated[
    int,
    typer.Option(parser=_size, metavar="SIZE", help="Largest request body.", rich_help_panel="Limits"),
]
MaxN = Annotated[int, typer.Option(help="Most answers (n) to one request.", rich_help_panel="Limits")]
MaxStopStrings = Annotated[
    int, typer.Option(help="Most stop strings in one request.", rich_help_panel="Limits")
]
MaxAttempts = Annotated[
    int,
    typer.Option(
        help="So many attempts of a request may fail, as workers die or handoffs break; then it is given up "
        "on.",
        rich_help_panel="Limits",
    ),
]
QueueTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Longest time that a request waits for a worker that can take it; 0: not at all.",
        rich_help_panel="Limits",
    ),
]

Disaggregation = Annotated[
    str,
    typer.Option(
        help="Where prompts are computed. conditional: on a prefill worker, or on the decode worker where "
        "that is estimated to cost less; always: on a prefill worker while one is ready; never: where they "
        "are answered.",
        rich_help_panel=_PLACEMENT,
    ),
]
ItlTargetMs = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        help="Longest step of a decode worker that a prompt may be computed in beside running answers. "
        "Default: their delay counts like that of the prompt's own first token.",
        rich_help_panel=_PLACEMENT,
    ),
]
NoPrefill = Annotated[
    str,
    typer.Option(
        help="While no prefill worker is ready: fail requests, queue them, or compute prompts where they are "
        "answered (local).",
        rich_help_panel=_PLACEMENT,
    ),
]
NoDecode = Annotated[
    str,
    typer.Option(
        help="While no worker is ready that could answer: fail requests, or queue them.",
        rich_help_panel=_PLACEMENT,
    ),
]

LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_PROCESS)]
UpLogLevel = Annotated[
    str,
    typer.Option(
        help="What to show of the processes' logs: debug, info, warning or error.", rich_help_panel=_PROCESS
    ),
]
DrainTimeout = Annotated[
    int | None,
    typer.Option(
        metavar="SECONDS",
        help="Longest time that a worker told to stop waits for its open requests. Default: no limit. "
        "A second signal ends it at once.",
        rich_help_panel=_PROCESS,
    ),
]
SwitchTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Longest time that the worker waits for its open requests; what is left then goes on elsewhere. "
        "0: its own --drain-timeout.",
    ),
]
RouterDrainTimeout = Annotated[
    int,
    typer.Option(
        metavar="SECONDS",
        help="Longest time that a router told to stop lets answers under way end in; it takes nothing new "
        "meanwhile. A second signal ends it at once.",
        rich_help_panel=_PROCESS,
    ),
]
ExitWithParent = Annotated[
    int | None,
    typer.Option(
        metavar="PID",
        help="End when the process that started this one, PID, has ended.",
        rich_help_panel=_PROCESS,
    ),
]

Url = Annotated[str, typer.Option(help="Address of the ring's HTTP API.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY",
        show_default=False,
        help="The key that the ring knows, if it wants one. Better given in the environment.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat/--completion", help="Ask through the model's chat template, or let it continue the text."
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer. Default: the server's.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 always takes the likeliest token. Default: the model's.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]

SimulatedNumBlocks = Annotated[
    int | None, typer.Option(help="KV blocks per worker. Default: 4096.", rich_help_panel=_MEMORY)
]
SimulatedMixedPrefillTokens = Annotated[
    int | None,
    typer.Option(
        help="Most prompt tokens of a step that decodes as well: running answers wait for them. Default: no "
        "limit of its own.",
        rich_help_panel=_MEMORY,
    ),
]
SimulatedRole = Annotated[RoleName, typer.Option(help="prefill, decode or both.", rich_help_panel=_SIMULATED)]
Profile = Annotated[
    str,
    typer.Option(help="How fast it is: 8b-h100, 8b-l4, instant, or a JSON file.", rich_help_panel=_SIMULATED),
]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        help="name=figure; give it once for each: die_mean_s, hang_mean_s, hang_s, slow_mean_s, slow_s, "
        "slow_factor, error_rate, seed.",
        rich_help_panel=_SIMULATED,
    ),
]
SimulatedRevision = Annotated[
    str | None,
    typer.Option(help="What it says is its model's. Default: the files' own.", rich_help_panel=_SIMULATED),
]
SimulatedHttpPort = Annotated[
    int,
    typer.Option(
        help="Serve a plain OpenAI API beside, for other routers; 0: any port, -1: none.",
        rich_help_panel=_SIMULATED,
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option(help="Write down when each token was there, for measurements.", rich_help_panel=_SIMULATED),
]
