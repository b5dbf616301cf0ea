"""The hub that models come from, and the folder that they are kept in."""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from baton.doctor.finding import Finding, lack, missing, ok
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted
from baton.hub import DEMO, looks_like_path

_OFFLINE = "HF_HUB_OFFLINE"


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The model, where it is kept, and the hub. Only a model that must be fetched needs the hub."""
    model = wanted.worker.model
    if looks_like_path(model) and not Path(model).expanduser().is_dir():
        yield lack("model", f"{model}: no such folder", "name one that has config.json and *.safetensors")
        model = DEMO
    local = model == DEMO or Path(model).expanduser().is_dir()
    cached = not local and _is_cached(model)
    needed = not local and not cached
    if not local:
        yield _model(model, cached)
    yield _cache(needed)
    yield _hub(wanted.timeout, needed)


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _model(model: str, cached: bool) -> Finding:
    if cached:
        return ok("model", f"{model} is in the cache")
    offline = _is_offline()
    says = f"{model} is no folder here, and not in the cache" + (
        "; it will be fetched" if not offline else ""
    )
    do = f"unset {_OFFLINE}, or fetch it on a machine with a network: hf download {model}"
    return lack("model", says, do) if offline else ok("model", says)


def _cache(needed: bool) -> Finding:
    from huggingface_hub.constants import HF_HOME

    folder = Path(HF_HOME)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return ok("HF_HOME", f"{folder} can be written")
    except OSError as error:
        do = "name a folder that can be written by HF_HOME, or mount one there (model.cache in the chart)"
        return missing("HF_HOME", f"{folder} cannot be written: {error.strerror}", do, needed=needed)


def _is_offline() -> bool:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return HF_HUB_OFFLINE


def _hub(timeout_s: float, needed: bool) -> Finding:
    from huggingface_hub.constants import ENDPOINT

    if _is_offline():
        do = f"unset {_OFFLINE}"
        return missing("hub", f"{_OFFLINE} is set: nothing is asked of {ENDPOINT}", do, needed=needed)
    do = (
        "see to the network, name a proxy (HTTPS_PROXY) or a mirror (HF_ENDPOINT), or fetch the model "
        "elsewhere and name its folder with --model"
    )
    try:
        with urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=timeout_s):
            pass
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code == 407:
            return missing("hub", f"{ENDPOINT} answers with {error.code}", do, needed=needed)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return missing("hub", f"{ENDPOINT} is out of reach: {why}", do, needed=needed)
    token = "with" if os.environ.get("HF_TOKEN") else "without"
    return ok("hub", f"{ENDPOINT} answers; {token} HF_TOKEN")
