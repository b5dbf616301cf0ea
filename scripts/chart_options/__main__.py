"""Writes what the chart's schema says of the programs' options: ``python -m scripts.chart_options``.

``--check`` writes nothing, and fails where the file differs.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_origin

from baton.planner.config import PlannerConfig
from baton.process.fields import DeclaredOption, options_of
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = Path(__file__).parents[2] / "helm/baton/values.schema.json"

_SERVICE = {"model", "served_model_name", "host", "port", "drain_timeout"}
_DISCOVERY = {"kubernetes_namespace", "kubernetes_selector", "kubeconfig", "kubernetes_context"}
_SECRETS = {
    *("cluster_key", "cluster_key_previous"),
    *(f"worker_tls_{what}" for what in ("certfile", "keyfile", "ca_certs", "server_name")),
}

DEFINITIONS: dict[str, tuple[type[DataclassInstance], set[str]]] = {
    "workerOptions": (
        WorkerConfig,
        {
            *(_SERVICE | _SECRETS),
            *("metrics_port", "tensor_parallel_size", "pipeline_parallel_size"),
            *("nodes", "node_port", "join_timeout"),
        },
    ),
    "plannerOptions": (
        PlannerConfig,
        {
            *(_DISCOVERY | _SECRETS),
            *("prefill_gpus", "decode_gpus", "prefill_deployment", "decode_deployment", "dry_run"),
            *("host", "metrics_port"),
        },
    ),
    "routerOptions": (
        RouterConfig,
        {
            *(_SERVICE | _DISCOVERY | _SECRETS),
            *("workers", "discovery", "models", "grpc_port", "api_keys"),
            *("redis_url", "redis_password_file"),
            *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_client_auth"),
        },
    ),
}
"""Definition → whose options they are, but those that the chart sets from values of their own."""

FURTHER: dict[str, dict[str, object]] = {
    "device": {"pattern": "^(auto|cpu|cuda(:[0-9]+)?)$"},
    "otlp_endpoint": {"pattern": "^https?://"},
    "attainment": {"minimum": 0.5, "maximum": 0.9999},
    **{
        f"{bound}_{role}": {"minimum": 1, "maximum": 1024}
        for bound in ("min", "max")
        for role in ("prefill", "decode")
    },
    **{f"{what}_seconds": {"exclusiveMinimum": 0} for what in ("start", "switch", "settle")},
}
"""What is checked by more than bounds and choices."""


def main() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    written = text
    for name in DEFINITIONS:
        head = f'\n    "{name}": {{\n      "type": "object",\n      "properties": {{\n'
        before, found, after = written.partition(head)
        assert found, f"{SCHEMA.name} has no {name}"
        _, end, rest = after.partition("\n      },")
        written = before + head + _properties(name) + end + rest
    if "--check" not in sys.argv[1:]:
        SCHEMA.write_text(written, encoding="utf-8")
    elif written != text:
        sys.exit(f"{SCHEMA.name} is not what the options say: run python -m scripts.chart_options")


def _properties(definition: str) -> str:
    config, apart = DEFINITIONS[definition]
    lines = [
        f"        {json.dumps(_camel(declared.field))}: {json.dumps(_schema(declared))}"
        for declared in options_of(config)
        if declared.field not in apart and declared.default is not MISSING
    ]
    return ",\n".join(lines)


def _schema(declared: DeclaredOption) -> dict[str, object]:
    """What JSON Schema says of a value of an option."""
    option, kinds = declared.option, (declared.type, *get_args(declared.type))
    if declared.field == "log_level":
        return {"$ref": "#/$defs/logLevel"}
    if declared.choices:
        return {"enum": list(declared.choices)}
    if option.parse is not None:
        return {"$ref": "#/$defs/size"}
    if bool in kinds:
        return {"type": "boolean"}
    if get_origin(declared.type) is tuple:
        return {"type": "array", "items": {"type": "string", "minLength": 1}}
    further = FURTHER.get(declared.field)
    if int in kinds or float in kinds:
        bounds = {"minimum": option.least, "maximum": option.most}
        said = further or {name: bound for name, bound in bounds.items() if bound is not None}
        return {"type": "integer" if int in kinds else "number", **said}
    return {"type": "string", **(further or {"minLength": 1})}


def _camel(field: str) -> str:
    return re.sub(r"_(.)", lambda found: found[1].upper(), field)


if __name__ == "__main__":
    main()
