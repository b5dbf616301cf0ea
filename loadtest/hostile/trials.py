"""What is tried on processes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadtest.hostile.vocabulary import Trial

TRIALS: Mapping[str, Trial] = MappingProxyType({})
