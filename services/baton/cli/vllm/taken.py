"""The options of ``vllm serve`` that ``baton serve`` takes: each with Baton's own, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.cli.vllm.option import (
    VllmOption,
    fixed,
    from_json,
    list_of_json,
    mapped,
    renamed,
    repeated,
    same,
    switch,
    whole,
)
from baton.process.fields import options_of
from baton.worker.config import WorkerConfig

_METHODS = {"draft_model": "draft"}
_SPECULATIVE = {
    "method": "--speculative-method",
    "model": "--speculative-model",
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_min": "--speculative-ngram-min",
    "prompt_lookup_max": "--speculative-ngram-max",
}
_LEVELS = {"CRITICAL": "error", "NOTSET": "debug", "critical": "error", "trace": "debug"}


def _speculative(values: Sequence[str]) -> list[str]:
    given = from_json(values[0])
    if not isinstance(given, Mapping):
        raise ValueError(f"""must be an object, such as '{{"method": "ngram"}}', not {values[0]}""")
    unknown = sorted(set(given) - set(_SPECULATIVE))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such key here; allowed: {', '.join(_SPECULATIVE)}")
    argv: list[str] = []
    for key, value in given.items():
        argv += [_SPECULATIVE[key], _METHODS.get(str(value), str(value)) if key == "method" else str(value)]
    return argv


def _length(text: str) -> str | None:
    return None if text in ("-1", "auto") else whole(text)


def _gibibytes(text: str) -> str:
    try:
        return str(int(float(text) * (1 << 30)))
    except ValueError:
        raise ValueError(f"{text!r} is no number of GiB") from None


def _devices(text: str) -> str:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"must be numbers of CUDA devices, as in 0,1, not {text!r}")
    return ",".join(f"cuda:{number}" for number in numbers)


def _choices(field: str) -> tuple[str, ...]:
    return next(declared.choices for declared in options_of(WorkerConfig) if declared.field == field)


def _level(text: str) -> str:
    return _LEVELS.get(text, text.lower())


def _unless_zero(text: str) -> str | None:
    return None if text == "0" else text


_MODEL = (
    VllmOption(("--model",), "taken", "It may stand before or behind the options.", "MODEL", "one", list),
    same("--chat-template", "A file, or the template itself. It holds for chats with tools too."),
    same("--revision", "Of a model of the hub: it is fetched once, before the processes start."),
    renamed(
        "--dtype",
        "--dtype",
        "`half` and `float` are read as `float16` and `float32`.",
        read=mapped({"half": "float16", "float": "float32"}),
    ),
    renamed(
        "--max-model-len",
        "--max-model-len",
        "`32k`, `32K`, `auto` and `-1` are read as vLLM does.",
        read=_length,
    ),
    renamed(
        "--quantization/-q",
        "--quantization",
        "`auto` reads a checkpoint as its config.json says; `fp8` and `int8` round a plain one.",
        verdict="different",
    ),
    renamed(
        "--load-format",
        "--load-format",
        "`auto`, which reads safetensors alone, or `dummy`.",
        verdict="different",
        read=mapped({"safetensors": "auto", "hf": "auto"}),
    ),
    repeated("--served-model-name", "The first is the model's name in answers and metrics.", arity="several"),
    switch("--trust-remote-code", [], [], "Baton never runs code of a checkpoint, and so needs no leave."),
    switch("--language-model-only", [], "Baton serves text alone.", "Baton serves text alone anyway."),
    renamed(
        "--generation-config",
        "--generation-config",
        "`vllm` is `none`. A folder is refused: the file is read where the model is.",
        read=mapped({"vllm": "none"}),
    ),
    switch(
        "--use-tqdm-on-load",
        [],
        "Bars are drawn on terminals alone: write to a file or a pipe.",
        "Bars are drawn on a terminal, and lines written elsewhere.",
    ),
    fixed("--runner", ("auto", "generate"), "Baton generates text, and neither embeds nor ranks."),
    fixed("--convert", ("auto", "none"), "Baton generates text, and neither embeds nor ranks."),
    fixed("--tokenizer-mode", ("auto", "hf"), "Tokenizers are read from tokenizer.json."),
    fixed("--config-format", ("auto", "hf"), "A model is a directory with config.json."),
    fixed("--model-impl", ("auto",), "Each architecture has Baton's own implementation."),
    fixed("--max-logprobs", ("20",), "It is 20, as in OpenAI's API."),
    fixed("--logprobs-mode", ("raw_logprobs",), "They are of the model's own distribution."),
)

_MEMORY = (
    same("--block-size"),
    same("--max-num-seqs", "Of each worker; the default is Baton's own."),
    renamed(
        "--max-num-batched-tokens",
        "--max-num-batched-tokens",
        "`8k` and `8K` are read as vLLM does.",
        read=whole,
    ),
    renamed(
        "--gpu-memory-utilization/--device-memory-utilization",
        "--gpu-memory-utilization",
        "Of the whole device, other processes included: workers that share one share it. Default 0.9.",
        verdict="different",
    ),
    renamed("--kv-cache-memory-bytes", "--kv-cache-memory", "Of each worker.", read=whole),
    renamed("--num-gpu-blocks-override", "--num-blocks", "On a CPU too."),
    switch("--enable-prefix-caching", ["--prefix-caching"], ["--no-prefix-caching"]),
    switch("--enable-chunked-prefill", ["--chunked-prefill"], ["--no-chunked-prefill"]),
    renamed(
        "--long-prefill-token-threshold",
        "--prefill-chunk",
        "It also holds for a prompt that is alone in its step.",
        verdict="different",
        read=_unless_zero,
    ),
    same("--scheduling-policy", "With `priority` nobody starves: see --priority-aging."),
    switch("--enforce-eager", ["--enforce-eager"], []),
    VllmOption(
        ("--async-scheduling",),
        "taken",
        "Baton's own `auto` is the default.",
        "--async-scheduling",
        "none",
        lambda values: ["--async-scheduling", values[0]],
        _choices("async_scheduling"),
    ),
    renamed(
        "--kv-offloading-size",
        "--host-kv-memory",
        "In GiB. Of each worker, and of each rank of it.",
        verdict="different",
        read=_gibibytes,
    ),
    fixed("--kv-offloading-backend", ("native",), "Baton has one host tier, `--host-kv-memory`."),
    renamed(
        "--kv-cache-dtype",
        "--kv-cache-dtype",
        "`auto`, `fp8` (e4m3, with a checkpoint's scales) or `fp8-dynamic` (scales by block).",
        verdict="different",
        read=mapped({"fp8_e4m3": "fp8"}),
    ),
    fixed("--mamba-cache-dtype", ("auto",), "States have the type that the model's config.json says."),
    fixed("--stream-interval", ("1",), "Each token is sent as it comes."),
    fixed("--moe-backend", ("auto",), "Baton chooses among its kernels by itself."),
    fixed("--linear-backend", ("auto",), "Baton chooses among its kernels by itself."),
)

_PARALLEL = (
    same(
        "--tensor-parallel-size/-tp",
        "Of each worker; `--prefill-tensor-parallel-size` and its like differ by role.",
    ),
    same("--pipeline-parallel-size/-pp", "Likewise."),
    renamed(
        "--device-ids",
        "--device",
        "Numbers as CUDA counts them, dealt out to the workers; no UUIDs.",
        verdict="different",
        read=_devices,
    ),
    fixed("--distributed-executor-backend", ("mp",), "Ranks are processes of this machine, without Ray."),
    renamed("--api-server-count/-asc", "--processes", "Router processes that share the port."),
)

_SPECULATION = (
    VllmOption(
        ("--speculative-config", "-sc"),
        "different",
        "Keys: method (ngram, draft_model, medusa, "
        "eagle), model, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max.",
        "--speculative-method …",
        "one",
        _speculative,
    ),
    renamed(
        "--spec-method",
        "--speculative-method",
        "ngram, draft_model, medusa and eagle.",
        verdict="different",
        read=mapped(_METHODS),
    ),
    renamed("--spec-model", "--speculative-model"),
    renamed("--spec-tokens", "--num-speculative-tokens"),
)

_FRONT = (
    same("--host", "Default: 127.0.0.1, this machine alone. vLLM listens on all addresses."),
    same("--port"),
    renamed(
        "--grpc-port",
        "--grpc-port",
        "Baton's own gRPC API, which is always on; -1 serves none.",
        verdict="different",
    ),
    repeated(
        "--api-key",
        "Every key may see everything; --api-keys has tenants, limits and hashes.",
        arity="several",
    ),
    same("--ssl-certfile"),
    same("--ssl-keyfile"),
    switch(
        "--enable-ssl-refresh",
        [],
        "Certificates are always read again when they change.",
        "Certificates are always read again when they change.",
    ),
    fixed("--ssl-cert-reqs", ("0",), "For clients' certificates start `baton router --ssl-client-auth`."),
    switch("--allow-credentials", ["--allow-credentials"], ["--no-allow-credentials"]),
    repeated("--allowed-origins", "A list in JSON, or the option again for each.", read=list_of_json),
    repeated("--allowed-methods", "A list in JSON, or the option again for each.", read=list_of_json),
    repeated("--allowed-headers", "A list in JSON, or the option again for each.", read=list_of_json),
    switch(
        "--enable-auto-tool-choice",
        [],
        "Say `--tool-call-parser none`.",
        "Tools are on where the model's template has them.",
    ),
    renamed(
        "--tool-call-parser",
        "--tool-call-parser",
        "hermes, llama3_json, auto or none.",
        verdict="different",
        read=mapped({"": "auto"}),
    ),
    renamed(
        "--reasoning-parser",
        "--reasoning-parser",
        "think, deepseek_r1, auto or none; `qwen3` is `think`.",
        verdict="different",
        read=mapped({"": "auto", "qwen3": "think"}),
    ),
    fixed("--chat-template-content-format", ("auto",), "It is found in the model's template."),
    fixed("--response-role", ("assistant",), "Answers are the assistant's."),
    switch(
        "--exclude-tools-when-tool-choice-none",
        [],
        "They are always left out.",
        'With `tool_choice: "none"` the tools are always left out of the prompt.',
    ),
    switch("--enable-prompt-tokens-details", [], "They are always told.", "`usage` always has them."),
    switch(
        "--enable-request-id-headers",
        [],
        "They are always sent.",
        "`x-request-id` and `x-baton-request-id` are always sent.",
    ),
    switch(
        "--disable-fastapi-docs",
        [],
        "Baton has no such pages.",
        "Baton has no such pages; `/openapi.json` stays.",
    ),
    switch("--enable-server-load-tracking", [], "`/load` always tells it.", "`/load` always tells it."),
    switch(
        "--disable-uvicorn-access-log",
        [],
        "Say `--audit-log FILE`, of `baton router`.",
        "There is no access log; an audit log is asked for.",
    ),
    switch("--disable-log-stats", [], [], "Figures are in /metrics and /ui, not in logs."),
    renamed(
        "--max-num-queued-reqs",
        "--queue-size",
        "Requests that wait for their turn at the router; running ones do not count.",
        verdict="different",
    ),
    renamed(
        "--max-num-queued-tokens",
        "--queue-tokens",
        "Prompt tokens of requests that wait for their turn at the router.",
        verdict="different",
        read=whole,
    ),
    renamed("--otlp-traces-endpoint", "--otlp-endpoint", "OTLP over gRPC: http://HOST:4317."),
    renamed(
        "--log-level", "--log-level", "What is shown of the processes' logs. Default: warning.", read=_level
    ),
    renamed(
        "--uvicorn-log-level",
        "--log-level",
        "One level for all of the processes' logs.",
        verdict="different",
        read=_level,
    ),
)

TAKEN: tuple[VllmOption, ...] = (*_MODEL, *_MEMORY, *_PARALLEL, *_SPECULATION, *_FRONT)
