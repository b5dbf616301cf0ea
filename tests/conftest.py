"""Settings for every test."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Importing all tests makes millions of objects that stay: there is no garbage to look for until that is over.
gc.disable()

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Before anything else imports triton: transformers does.
    import tests.support.interpreted  # noqa: F401

# No test trusts anyone outside. Reading whom the world trusts takes 50 ms for each HTTP client that is made.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# The models here are tiny: handing their operations to more threads costs more than computing them.
torch.set_num_threads(1)

# A machine that is busy is no bug; what hangs is ended by the tests' own timeout.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what was imported from garbage collection: a collection among it takes half a second, and tests
    ask for many."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # triton's bindings name all that is left of them at the end
        gc.enable()
