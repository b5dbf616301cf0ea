"""The options of ``vllm serve`` that ``baton serve`` refuses by name, with the reason and what to use."""

from __future__ import annotations

from baton.cli.vllm.option import VllmOption, refused, switch

_STARTING = (
    *refused("Give options on the command line, or those of the chart in its values.", "--config"),
    *refused(
        "`baton node` lends a machine to a worker that leads elsewhere.", "--headless", instead="baton node"
    ),
    *refused("The gRPC API is always on, beside HTTP.", "--grpc", instead="--grpc-port"),
    *refused(
        "A worker drains for as long as its own option says: start services one by one.",
        "--shutdown-timeout",
        instead="baton router --drain-timeout",
    ),
    *refused("vLLM's environment variables mean nothing here.", "--fail-on-environ-validation"),
    *refused(
        "A token on the command line shows in every process list: set HF_TOKEN.",
        "--hf-token",
        instead="HF_TOKEN",
    ),
    *refused(
        "The hub's client decides where files are kept: set HF_HOME.", "--download-dir", instead="HF_HOME"
    ),
)

_MODEL = (
    *refused("The tokenizer is read where the model is: make a directory that has both.", "--tokenizer"),
    *refused(
        "Text and tokens are Baton's to turn into each other.", "--skip-tokenizer-init", "--tokens-only"
    ),
    *refused(
        "One revision holds for all of a model's files, and none of them is run.",
        "--code-revision",
        "--tokenizer-revision",
        instead="--revision",
    ),
    *refused(
        "A model is a directory with its config.json: edit that one.",
        "--hf-config-path",
        "--hf-overrides",
        "--model-class-overrides",
    ),
    *refused("Requests that give no seed get one of their own: send `seed` with each.", "--seed"),
    *refused(
        "Edit the model's generation_config.json, or send the fields with each request.",
        "--override-generation-config",
        instead="--generation-config",
    ),
    *refused(
        "The checkpoint's config.json says how it is quantized; a plain one is rounded to `fp8` or `int8`.",
        "--quantization-config",
        "--allow-deprecated-quantization",
        instead="--quantization",
    ),
    *refused("Prompts are text or tokens.", "--enable-prompt-embeds"),
    *refused(
        "Answers have tokens and log-probabilities, and nothing of layers or samplers.",
        "--enable-return-routed-experts",
        "--return-sampling-mask",
        "--enable-trace-replay",
        "--aux-output-config",
    ),
    *refused("Noise is drawn as each request's seed says.", "--use-fp64-gumbel"),
    *refused("Windows are a part of the model.", "--disable-sliding-window"),
    *refused("vLLM has no such attention any more, and Baton never had.", "--disable-cascade-attn"),
    *refused(
        "Baton neither embeds nor ranks.",
        "--pooler-config",
        "--io-processor-plugin",
        "--enable-flash-late-interaction",
    ),
    *refused(
        "A worker that is not needed is ended, or takes another role.",
        "--enable-sleep-mode",
        "--sleep-mode-offload-cudagraph",
        "--sleep-preserve-parameter-names",
        "--enable-cumem-allocator",
        "--enable-nccl-comm-suspend",
        instead="baton switch-role",
    ),
    *refused(
        "Sampling is what docs/sampling.md has; no code of yours runs in a step.", "--logits-processors"
    ),
    *refused("Prompts are prepared beside the router, in processes of their own.", "--renderer-num-workers"),
    *refused(
        "Weights are read from safetensors by Baton's own loader.",
        "--safetensors-load-strategy",
        "--safetensors-prefetch-num-threads",
        "--safetensors-prefetch-block-size",
        "--model-loader-extra-config",
        "--ignore-patterns",
        "--pt-load-map-location",
        "--max-parallel-loading-workers",
    ),
    *refused("Diffusion models are not served.", "--diffusion-config/-dc"),
    *refused("Engrams are not served.", "--engram-config"),
    *refused("Weights change with a new worker.", "--weight-transfer-config"),
    *refused("Answers carry no watermark.", "--watermark-config"),
)

_KERNELS = (
    *refused(
        "Baton chooses among its kernels by itself.",
        "--gdn-prefill-backend",
        "--kda-prefill-backend",
        "--kda-decode-backend",
        "--attention-backend",
        "--attention-config/-ac",
        "--mamba-backend",
        "--mamba-ssu-algorithm",
        "--ir-op-priority",
        "--enable-flashinfer-autotune",
        "--sparse-indexer-topk-backend",
        "--kernel-config",
        "--disable-custom-all-reduce",
    ),
    *refused(
        "States are rounded as the model says.",
        "--enable-mamba-cache-stochastic-rounding",
        "--mamba-cache-philox-rounds",
        "--mamba-ssm-cache-dtype",
    ),
    *refused(
        "Nothing is compiled; graphs follow from --max-num-seqs and --max-graph-tokens.",
        "--compilation-config/-cc",
        "--cudagraph-capture-sizes",
        "--max-cudagraph-capture-size",
        "--optimization-level",
        instead="--enforce-eager, --max-graph-tokens",
    ),
    *refused(
        "Say what you want of steps and graphs by their own options.",
        "--performance-mode",
        "--additional-config",
        instead="--max-num-batched-tokens, --prefill-chunk",
    ),
)

_LORA = refused(
    "Adapters are not served: merge them into the checkpoint.",
    *("--lora-modules", "--enable-lora", "--max-loras", "--max-lora-rank", "--lora-dtype"),
    *("--enable-tower-connector-lora", "--max-cpu-loras", "--fully-sharded-loras", "--lora-target-modules"),
    *("--default-mm-loras", "--specialize-active-lora", "--enable-mixed-moe-lora-format"),
    *("--enable-moe-shared-loras", "--max-lora-cls-labels"),
)

_MULTIMODAL = refused(
    "Baton serves text alone.",
    *("--allowed-local-media-path", "--allowed-media-domains", "--trust-request-mm-kwargs"),
    *("--limit-mm-per-prompt", "--enable-mm-embeds", "--media-io-kwargs", "--mm-processor-kwargs"),
    *("--mm-processor-cache-gb", "--mm-processor-cache-type", "--mm-hasher-algorithm"),
    *("--mm-shm-cache-max-object-size-mb", "--mm-encoder-only", "--mm-encoder-tp-mode"),
    *("--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"),
    *("--mm-encoder-fp8-scale-save-path", "--mm-encoder-fp8-scale-save-margin", "--interleave-mm-strings"),
    *("--skip-mm-profiling", "--video-pruning-rate", "--video-pruning-method", "--mm-tensor-ipc"),
    *("--mm-processor-device", "--mm-ipc-gpu-memory-gb", "--mm-device-do-normalize"),
    *("--disable-chunked-mm-input", "--ec-transfer-config", "--ec-manager-config"),
)

_PARALLEL = (
    *refused(
        "`baton serve` starts a ring on one machine; a leader and `baton node` make one of several.",
        "--master-addr",
        "--master-port",
        "--nnodes/-n",
        "--node-rank/-r",
        "--distributed-timeout-seconds",
        "--cpu-distributed-timeout-seconds",
        instead="baton prefill --nodes, baton node",
    ),
    *refused(
        "Copies of a model are workers, and the router places requests on them.",
        "--data-parallel-size/-dp",
        "--data-parallel-rank/-dpn",
        "--data-parallel-start-rank/-dpr",
        "--data-parallel-size-local/-dpl",
        "--data-parallel-address/-dpa",
        "--data-parallel-rpc-port/-dpp",
        "--data-parallel-backend/-dpb",
        "--data-parallel-hybrid-lb/-dph",
        "--data-parallel-external-lb/-dpe",
        "--data-parallel-multi-port-external-lb/-dpm",
        "--data-parallel-supervisor-port",
        "--dp-supervisor-probe-interval-s",
        "--dp-supervisor-probe-timeout-s",
        "--dp-supervisor-probe-failure-threshold",
        "--dp-sync-interval",
        "--disable-nccl-for-dp-synchronization",
        "--prefill-schedule-interval",
        instead="--prefill N --decode N, --both N",
    ),
    *refused(
        "Ranks share heads and rows, and no context.",
        "--decode-context-parallel-size/-dcp",
        "--prefill-context-parallel-size/-pcp",
        "--dcp-comm-backend",
        "--dcp-q-replicate",
        "--dcp-kv-cache-interleave-size",
        "--cp-kv-cache-interleave-size",
        "--enable-hc-sp",
        "--enable-batch-sharded-sampling",
        instead="--tensor-parallel-size",
    ),
    *refused(
        "Each rank has its rows of every expert.",
        "--enable-expert-parallel/-ep",
        "--enable-ep-weight-filter",
        "--all2all-backend",
        "--enable-eplb",
        "--eplb-config",
        "--expert-placement-strategy",
        "--enable-elastic-ep",
        "--elastic-ep-max-dp-size",
        instead="--tensor-parallel-size",
    ),
    *refused(
        "A step is not cut in two: prompts and answers are in different workers.",
        "--enable-dbo",
        "--ubatch-size",
        "--dbo-decode-token-threshold",
        "--dbo-prefill-token-threshold",
    ),
    *refused(
        "Threads and memory are bound from outside: start services one by one under numactl.",
        "--numa-bind",
        "--numa-bind-nodes",
        "--numa-bind-cpus",
    ),
    *refused("Ranks are processes of this machine, without Ray.", "--ray-workers-use-nsight"),
    *refused(
        "Workers are Baton's own, and no code of yours runs in them.",
        "--worker-cls",
        "--worker-extension-cls",
    ),
    *refused("Ranks of one machine talk as they find best.", "--enable-shm-tensor-arena"),
    *refused(
        "It is always on: a lost worker costs a pause and no token.",
        "--enable-fault-tolerance",
        "--fault-tolerance-config",
    ),
)

_MEMORY = (
    *refused(
        "Blocks are found by BLAKE2 hashes of their tokens, salted by tenant.", "--prefix-caching-hash-algo"
    ),
    *refused(
        "Blocks that nobody holds stay until their memory is needed.",
        "--prefix-cache-retention-interval",
        "--watermark",
    ),
    *refused("Whole blocks are shared.", "--prefix-match-unit", instead="--block-size"),
    *refused("All layers keep KV in one type.", "--kv-cache-dtype-skip-layers", instead="--kv-cache-dtype"),
    *refused(
        "Layers with windows, latents and states have groups of blocks of their own, always.",
        "--disable-hybrid-kv-cache-manager",
        "--kv-sharing-fast-prefill",
        "--swa-bounded-replay",
        "--mamba-block-size",
        "--mamba-cache-mode",
        "--enable-mamba-shared-prefix-checkpoint",
        "--replayssm-buffer-len",
        "--use-replayssm",
        instead="--block-size",
    ),
    *refused(
        "Weights stay on the device; the host keeps KV blocks.",
        "--offload-backend",
        "--cpu-offload-gb",
        "--cpu-offload-params",
        "--offload-group-size",
        "--offload-num-in-group",
        "--offload-prefetch-step",
        "--offload-params",
        instead="--host-kv-memory",
    ),
    *refused(
        "Prefill and decode workers hand over by themselves: that is what Baton is for.",
        "--kv-transfer-config",
        instead="--connector",
    ),
    *refused("The router hears of blocks over gRPC.", "--kv-events-config"),
)

_SCHEDULING = (
    *refused(
        "A step has as many tokens as it computes, drafts included.",
        "--max-num-scheduled-tokens",
        instead="--max-num-batched-tokens",
    ),
    *refused("As many run as are made room for.", "--max-num-active-seqs", instead="--max-num-seqs"),
    *refused(
        "The bound of a chunk stands still.",
        "--long-prefill-token-threshold-adaptive",
        instead="--prefill-chunk",
    ),
    *refused("The scheduler is Baton's own.", "--scheduler-cls", instead="--scheduling-policy"),
    *refused("A prompt starts when its blocks are there.", "--scheduler-reserve-full-isl"),
)

_FRONT = (
    *refused("Requests that bring a chat template are refused.", "--trust-request-chat-template"),
    *refused("Send `chat_template_kwargs` with each request.", "--default-chat-template-kwargs"),
    *refused("Send `return_tokens_as_token_ids` with each request.", "--return-tokens-as-token-ids"),
    *refused(
        "Parsers are Baton's own: docs/tools.md has the formats.",
        "--tool-parser-plugin",
        instead="--tool-call-parser",
    ),
    *refused(
        "Parsers are Baton's own: docs/tools.md has the formats.",
        "--reasoning-parser-plugin",
        instead="--reasoning-parser",
    ),
    *refused("Reasoning ends where the model ends it.", "--reasoning-config"),
    *refused("Forced calls follow their schema, and others are the model's own.", "--tool-strict-level"),
    *refused("llguidance is the one backend of grammars.", "--structured-outputs-config"),
    *refused("Clients run their tools themselves.", "--tool-server"),
    *refused("Send `stream_options.include_usage` with each request.", "--enable-force-include-usage"),
    *refused("Nothing is sent between tokens.", "--sse-keep-alive-interval"),
    *refused("Baton does not serve Cohere's API.", "--cohere-is-reasoning-model", "--cohere-format"),
    *refused("Each request says whether the model reasons first.", "--anthropic-disabled-thinking-effort"),
    *refused(
        "There is no such endpoint.",
        "--enable-tokenizer-info-endpoint",
        "--enable-scale-out",
        "--enable-offline-docs",
    ),
    *refused(
        "`baton explain` tells the times of a request.",
        "--enable-per-request-metrics",
        "--per-request-spec-decode-metrics",
        instead="baton explain",
    ),
    *refused("The fingerprint names the model's revision.", "--fingerprint-mode", "--fingerprint-value"),
    *refused("Services listen on ports.", "--uds", instead="--port"),
    *refused(
        "Certificates of clients are checked by a router that is started by itself.",
        "--ssl-ca-certs",
        instead="baton router --ssl-ca-certs",
    ),
    *refused("TLS begins with 1.2, and has the ciphers of OpenSSL's default.", "--ssl-ciphers"),
    *refused("Paths begin at /: let the proxy in front take its prefix away.", "--root-path"),
    *refused("No code of yours runs in the router: put a proxy in front.", "--middleware"),
    *refused(
        "Bounds of headers and bodies are Baton's own.",
        "--h11-max-incomplete-event-size",
        "--h11-max-header-count",
        instead="--max-body-bytes",
    ),
)

_WATCHING = (
    *refused(
        "One line of JSON for each request is the audit log.",
        "--enable-log-requests",
        "--enable-log-outputs",
        "--enable-log-deltas",
        "--max-log-len",
        "--disable-access-log-for-endpoints",
        instead="--audit-log, --log-prompts",
    ),
    *refused(
        "Figures are in /metrics, and not in logs.",
        "--aggregate-engine-logging",
        "--enable-logging-iteration-details",
    ),
    *refused(
        "Errors of a service are logged with their cause.", "--log-error-stack", instead="--log-level debug"
    ),
    *refused("Logs have one form.", "--logging-config", "--log-config-file", instead="--log-level"),
    *refused("No metric is hidden.", "--show-hidden-metrics-for-version"),
    *refused("Spans are as docs/tracing.md has them.", "--collect-detailed-traces", instead="--trace-sample"),
    *refused(
        "Figures are as docs/metrics.md has them, always on.",
        "--kv-cache-metrics",
        "--kv-cache-metrics-sample",
        "--custom-histogram-buckets",
        "--cudagraph-metrics",
        "--enable-mfu-metrics",
        instead="/metrics",
    ),
    *refused(
        "Profile a worker from outside, as with py-spy or nsys.",
        "--enable-layerwise-nvtx-tracing",
        "--profiler-config",
    ),
    *refused("Kernels are built before a worker is ready.", "--jit-monitor-mode", "--jit-monitor-verbose"),
)

REFUSED: tuple[VllmOption, ...] = (
    *(*_STARTING, *_MODEL, *_KERNELS, *_LORA, *_MULTIMODAL, *_PARALLEL, *_MEMORY, *_SCHEDULING),
    *(*_FRONT, *_WATCHING),
)

EARLIER: tuple[VllmOption, ...] = (
    switch("--disable-log-requests", [], [], "Requests are not logged, unless an audit log is asked for."),
    *refused(
        "It is gone from vLLM too; the host keeps KV blocks that the pool has no room for.",
        "--swap-space",
        instead="--host-kv-memory",
    ),
    *refused(
        "It is gone from vLLM too; reasoning is told apart where the model's template shows it.",
        "--enable-reasoning",
        instead="--reasoning-parser",
    ),
    *refused(
        "It is gone from vLLM too; llguidance is the one backend of grammars.", "--guided-decoding-backend"
    ),
    *refused(
        "It is gone from vLLM too; graphs follow from --max-num-seqs.",
        "--max-seq-len-to-capture",
        instead="--max-graph-tokens",
    ),
    *refused(
        "It is gone from vLLM too; see --async-scheduling.",
        "--num-scheduler-steps",
        instead="--async-scheduling",
    ),
    *refused("It is gone from vLLM too; Baton generates text.", "--task"),
)
"""Options of earlier releases that scripts still have."""
