"""What tests of the connector ``nixl`` need, and what they say where it is not."""

from __future__ import annotations

import importlib.util

import pytest

HAVE_NIXL = importlib.util.find_spec("nixl_cu13") is not None
WITHOUT_NIXL = "NOT TESTED: nixl-cu13 is not installed (pip install 'baton[nixl]')"
needs_nixl = pytest.mark.skipif(not HAVE_NIXL, reason=WITHOUT_NIXL)
loads_nixl = (needs_nixl, pytest.mark.nixl)
"""The marks of a test that loads NIXL into pytest's own process."""
