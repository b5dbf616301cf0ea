"""What has become of vLLM's metrics: those of the same meaning are exported, the others are told of here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.telemetry.vllm import ALIASES, STAGE_ALIASES

COUNTERS = "_total"


@dataclass(frozen=True, slots=True)
class OtherMetric:
    """Metrics of vLLM that Baton does not have under their names."""

    baton: tuple[str, ...]
    """Baton's metrics to look at instead."""
    why: str


_HOST = OtherMetric(
    (
        "baton_host_kv_saved_bytes_total",
        "baton_host_kv_restored_bytes_total",
        "baton_host_kv_hit_blocks_total",
        "baton_host_kv_blocks_used",
        "baton_host_kv_dropped_blocks_total",
    ),
    "The host tier counts blocks and bytes; its times are in the stages of requests.",
)
_HANDOFF = OtherMetric(
    (
        "baton_handoff_received_bytes_total",
        "baton_handoff_stage_seconds",
        "baton_handoffs_completed_total",
        "baton_handoffs_aborted_total",
    ),
    "A handoff counts the same with every connector.",
)
_STORE = OtherMetric((), "No external store of KV is served: a handoff goes from worker to worker.")
_BLOCKS = OtherMetric(("baton_kv_blocks",), "Blocks are counted by state; single lives are not followed.")
_ASKED = OtherMetric((), "What clients ask for is in the audit log, request by request.")
_SLEEP = OtherMetric((), "Workers do not sleep.")

OTHERS: Mapping[str, OtherMetric] = MappingProxyType(
    {
        "admission_rejections": OtherMetric(
            ("baton_admission_refused_total",), "By reason, at the router, before a worker is asked."
        ),
        "cache_config_info": OtherMetric(
            ("baton_kv_blocks",), "A worker says its sizes in its log when it starts."
        ),
        "corrupted_requests": OtherMetric((), "Logits that are no numbers fail their request."),
        "diffusion_": OtherMetric((), "Diffusion models are not served."),
        "engine_sleep_state": _SLEEP,
        "sleep_mode_": _SLEEP,
        "estimated_": OtherMetric(("baton_engine_busy_seconds_total",), "Work is not estimated."),
        "external_prefix_cache_": OtherMetric(
            ("baton_host_kv_hit_blocks_total",), "The host tier is what is beyond the pool."
        ),
        "hf3fs_": _STORE,
        "hisparse_": _STORE,
        "mooncake_": _STORE,
        "iteration_tokens": OtherMetric(
            (
                "baton_engine_prompt_tokens_total",
                "baton_engine_generated_tokens_total",
                "baton_engine_steps_total",
            ),
            "Means of a step follow; there is no distribution.",
        ),
        "kv_block_": _BLOCKS,
        "kv_offload_": _HOST,
        "simple_kv_offload_": _HOST,
        "lora_requests_info": OtherMetric((), "Adapters are not served."),
        "mm_cache_": OtherMetric((), "Text alone is served."),
        "nixl_": _HANDOFF,
        "num_requests_kv_fetch_by_stage": OtherMetric(
            ("baton_handoffs_open",), "What waits for its KV blocks is an open handoff."
        ),
        "num_requests_waiting_by_reason": OtherMetric(
            ("baton_sequences_waiting", "baton_requests_waiting", "baton_admission_waiting_requests"),
            "Three queues: of a worker, for a worker, and for a turn.",
        ),
        "prompt_tokens_by_source": OtherMetric(
            ("baton_prompt_tokens_total", "baton_cached_prompt_tokens_total"),
            "Computed tokens are the difference.",
        ),
        "prompt_tokens_cached_by_source": OtherMetric(
            ("baton_cached_prompt_tokens_total", "baton_host_kv_hit_blocks_total"),
            "Tokens that the pool had, and blocks that the host had.",
        ),
        "request_inference_time_seconds": OtherMetric(
            ("baton_request_stage_seconds",), "Stage by stage, on the worker where it happened."
        ),
        "request_max_num_generation_tokens": _ASKED,
        "request_params_": _ASKED,
        "request_num_preemptions": OtherMetric(
            ("baton_preemptions_total",), "Counted for a worker; `baton explain` tells them of a request."
        ),
        "request_prefill_kv_computed_tokens": OtherMetric(
            ("baton_prompt_tokens_total", "baton_cached_prompt_tokens_total"),
            "Sums; there is no distribution.",
        ),
        "rl_": OtherMetric((), "Weights change with a new worker."),
        "spec_decode_num_accepted_tokens_per_pos": OtherMetric(
            ("baton_speculation_accepted_tokens_total",), "Not by position."
        ),
        "tool_call_parser_invocations": OtherMetric(
            ("baton_choices_total",), "Answers that end in calls are those of `finish_reason=tool_calls`."
        ),
        "watermark_requests": OtherMetric((), "Answers carry no watermark."),
        "websocket_": OtherMetric(("baton_http_connections",), "Only HTTP and gRPC are served."),
    }
)
"""What each metric is, by vLLM's name without ``vllm:``, or by how several begin, with an underscore at the
end."""

SAME: Mapping[str, str] = MappingProxyType(
    {alias.name: name for name, alias in ALIASES.items()}
    | {
        alias.name: f"baton_request_stage_seconds{{stage={stage!r}}}"
        for stage, alias in STAGE_ALIASES.items()
    }
)
"""vLLM's name -> Baton's metric of the same meaning, without the suffix of counters."""


def other(name: str) -> OtherMetric:
    """What is to be said of a metric that has no equal here. Raises KeyError where nothing is said."""
    bare = name.removeprefix("vllm:")
    if bare in OTHERS:
        return OTHERS[bare]
    beginning = max((key for key in OTHERS if key[-1] == "_" and bare.startswith(key)), key=len, default=name)
    return OTHERS[beginning]
