"""Settings for every test."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from hypothesis import settings

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
