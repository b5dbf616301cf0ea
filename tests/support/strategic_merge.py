"""Kubernetes' strategic merge patches, as far as the objects of the chart go: what ``helm upgrade`` sends.

Lists of maps are merged by a key of their kind; other lists, and lists without a key, are replaced.
"""

from __future__ import annotations

from typing import Any, cast

Object = dict[str, Any]

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "secrets": "name",
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
}
DIRECTIVES = ("$patch", "$retainKeys")


def merged(live: Object, patch: Object) -> Object:
    """``live`` with ``patch`` applied; neither is changed."""
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key not in DIRECTIVES}
    retained = patch.get("$retainKeys")
    found = {key: value for key, value in live.items() if retained is None or key in retained}
    for key, value in patch.items():
        if key in DIRECTIVES or key.startswith("$setElementOrder/"):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            field = key.partition("/")[2]
            found[field] = [each for each in found.get(field, []) if each not in value]
        elif value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = merged(cast(Object, found.get(key) or {}), value)
        elif isinstance(value, list):
            found[key] = _merged_list(key, found.get(key) or [], value)
        else:
            found[key] = value
    return found


def _merge_key(field: str, entries: list[Any]) -> str | None:
    if field == "ports":  # of containers, and of Services
        return "containerPort" if any("containerPort" in each for each in entries) else "port"
    return MERGE_KEYS.get(field)


def _merged_list(field: str, live: list[Any], patch: list[Any]) -> list[Any]:
    key = _merge_key(field, [*live, *patch])
    maps = all(isinstance(each, dict) for each in (*live, *patch))
    if key is None or not maps or not all(key in each for each in (*live, *patch)):
        return patch
    found = {each[key]: each for each in live}
    for each in patch:
        if each.get("$patch") == "delete":
            found.pop(each[key], None)
        else:
            found[each[key]] = merged(found.get(each[key], {}), each)
    return list(found.values())
