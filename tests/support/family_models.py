"""The tiny random models of every family, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.tiny_dense import DENSE
from tests.support.tiny_mixtures import MIXTURES
from tests.support.tiny_models import TINY_MODELS

FAMILY_MODELS: Mapping[str, Callable[[Path], Path]] = MappingProxyType({**TINY_MODELS, **DENSE, **MIXTURES})
"""Name -> builder, as ``TINY_MODELS``."""
