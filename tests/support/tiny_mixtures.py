"""Tiny random models of the families with experts, beside those of ``tests.support.tiny_models``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.support.tiny_models import Recipe

MIXTURES: Mapping[str, Recipe] = MappingProxyType({})
"""Name -> builder, as ``TINY_MODELS``."""
