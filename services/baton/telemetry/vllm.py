"""Baton's metrics a second time under vLLM's names, for dashboards made for vLLM.

Only metrics that mean the same are exported; names and labels are those of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

ENGINE = "0"
"""vLLM's label for one of several engines in a process; a process of Baton has one."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A metric's name in vLLM, without the suffix of counters."""

    name: str
    where: Mapping[str, str] = field(default_factory=dict)
    """Labels that a series must have to be exported; the labels themselves are left out."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels to keep, mapped to vLLM's names for them. Series that differ only in other labels are added
    up."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Values of kept labels that vLLM words differently."""


_FINISHED = {"cancelled": "abort", "deadline_exceeded": "abort"}

ALIASES: Mapping[str, Alias] = {
    "baton_time_to_first_token_seconds": Alias("vllm:time_to_first_token_seconds"),
    "baton_inter_token_latency_seconds": Alias("vllm:inter_token_latency_seconds"),
    "baton_time_per_output_token_seconds": Alias("vllm:request_time_per_output_token_seconds"),
    "baton_e2e_latency_seconds": Alias("vllm:e2e_request_latency_seconds"),
    "baton_decode_seconds": Alias("vllm:request_decode_time_seconds"),
    "baton_request_prompt_tokens": Alias("vllm:request_prompt_tokens"),
    "baton_request_generated_tokens": Alias("vllm:request_generation_tokens"),
    "baton_prompt_tokens": Alias("vllm:prompt_tokens"),
    "baton_cached_prompt_tokens": Alias("vllm:prompt_tokens_cached"),
    "baton_generated_tokens": Alias("vllm:generation_tokens"),
    "baton_choices": Alias(
        "vllm:request_success", labels={"finish_reason": "finished_reason"}, rename=_FINISHED
    ),
    "baton_sequences_running": Alias("vllm:num_requests_running"),
    "baton_sequences_waiting": Alias("vllm:num_requests_waiting"),
    "baton_kv_usage_ratio": Alias("vllm:kv_cache_usage_perc"),
    "baton_preemptions": Alias("vllm:num_preemptions"),
    "baton_prefix_queried_tokens": Alias("vllm:prefix_cache_queries"),
    "baton_prefix_hit_tokens": Alias("vllm:prefix_cache_hits"),
    "baton_speculation_verifications": Alias("vllm:spec_decode_num_drafts"),
    "baton_speculation_drafted_tokens": Alias("vllm:spec_decode_num_draft_tokens"),
    "baton_speculation_accepted_tokens": Alias("vllm:spec_decode_num_accepted_tokens"),
}
"""vLLM's metrics by Baton's name, without the suffix of counters."""

STAGE_ALIASES: Mapping[str, Alias] = {
    "prefill_queue": Alias("vllm:request_queue_time_seconds", where={"stage": "prefill_queue"}),
    "prefill": Alias("vllm:request_prefill_time_seconds", where={"stage": "prefill"}),
}
"""vLLM's metrics from a worker's ``baton_request_stage_seconds``, by stage."""


def with_vllm_names(registry: CollectorRegistry, model: str | None) -> CollectorRegistry:
    """Return a registry with all of ``registry``, and a second time under vLLM's name each metric that has
    one.

    ``model`` is the label for a worker's series, which have none; None for a router's series, which have one.
    """
    both = CollectorRegistry(auto_describe=False)
    both.register(_Both(registry, model))
    return both


class _Both(Collector):
    def __init__(self, registry: CollectorRegistry, model: str | None) -> None:
        self._registry = registry
        self._model = model

    def describe(self) -> list[Metric]:
        """Return nothing: names are known only when metrics are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = list(self._registry.collect())
        yield from families
        for family in families:
            for alias in self._aliases(family.name):
                yield _renamed(family, alias, self._model)

    def _aliases(self, name: str) -> list[Alias]:
        if name == "baton_request_stage_seconds":  # the router's stages include more than vLLM's do
            return list(STAGE_ALIASES.values()) if self._model is not None else []
        return [ALIASES[name]] if name in ALIASES else []


def _renamed(family: Metric, alias: Alias, model: str | None) -> Metric:
    renamed = Metric(alias.name, family.documentation, family.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_created" and all(sample.labels.get(k) == v for k, v in alias.where.items()):
            key = suffix, tuple(_labels(sample, alias, model).items())
            values[key] = values.get(key, 0.0) + sample.value
    for (suffix, labels), value in values.items():
        renamed.add_sample(alias.name + suffix, dict(labels), value)
    return renamed


def _labels(sample: Sample, alias: Alias, model: str | None) -> dict[str, str]:
    labels = {"model_name": model or sample.labels.get("model", ""), "engine": ENGINE}
    for name, theirs in alias.labels.items():
        labels[theirs] = alias.rename.get(sample.labels[name], sample.labels[name])
    if "le" in sample.labels:
        labels["le"] = sample.labels["le"]
    return labels
