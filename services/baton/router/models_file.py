"""The file of the models behind one router, and the configuration of each model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import msgspec

from baton.process.options import ConfigError
from baton.router.config import RouterConfig

MAX_BYTES = 1024 * 1024


class ModelEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One model of the file. Its workers are named, or found by a selector of their EndpointSlices."""

    name: str
    model: str
    """The model whose tokenizer and chat template are used, like ``--model``."""
    aliases: list[str] = []
    workers: list[str] = []
    kubernetes_selector: str | None = None
    tool_call_parser: str | None = None
    """The parser of tool calls. None, as for ``reasoning_parser``: the router's own option."""
    reasoning_parser: str | None = None


def each_model(config: RouterConfig) -> list[RouterConfig]:
    """Return the configuration of each model that a router serves: its own, or one for each entry of
    ``--models``.

    Raises ConfigError, which names the file and the entry.
    """
    if config.models is None:
        return [config]
    entries = _read(Path(config.models).expanduser())
    names = Counter(name for entry in entries for name in (entry.name, *entry.aliases))
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError("models", f"{config.models}: {twice[0]!r} names more than one model")
    return [_configured(config, entry, index) for index, entry in enumerate(entries)]


def _read(path: Path) -> list[ModelEntry]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("models", f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError("models", f"{path} has more than {MAX_BYTES} bytes")
    try:  # JSON is YAML too
        entries = msgspec.yaml.decode(content, type=list[ModelEntry])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError("models", f"{path}: {' '.join(str(error).split())}") from None
    if not entries:
        raise ConfigError("models", f"{path} names no model")
    return entries


def _configured(config: RouterConfig, entry: ModelEntry, index: int) -> RouterConfig:
    if not all((entry.name, entry.model, *entry.aliases)):
        raise ConfigError("models", f"{config.models}: [{index}] has an empty name or model")
    if bool(entry.workers) == (entry.kubernetes_selector is not None):
        raise ConfigError(
            "models",
            f"{config.models}: [{index}] ({entry.name}) needs either workers or a kubernetes_selector",
        )
    try:
        return dataclasses.replace(
            config,
            models=None,
            model=entry.model,
            served_model_name=(entry.name, *entry.aliases),
            workers=tuple(entry.workers),
            discovery="static" if entry.workers else "kubernetes",
            kubernetes_selector=(
                config.kubernetes_selector if entry.kubernetes_selector is None else entry.kubernetes_selector
            ),
            tool_call_parser=entry.tool_call_parser or config.tool_call_parser,
            reasoning_parser=entry.reasoning_parser or config.reasoning_parser,
        )
    except ConfigError as error:
        raise ConfigError(
            "models", f"{config.models}: [{index}] ({entry.name}): {error.option}: {error.problem}"
        ) from None
