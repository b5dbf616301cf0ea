"""Baton: disaggregated prefill/decode serving of large language models.

`LLM` and what belongs to it are here for programs; they are imported when they are asked for, because the
router imports this package where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.llm import LLM
    from baton.engine.outputs import CompletionOutput, RequestOutput
    from baton.request.params import SamplingParams
    from baton.request.structured import StructuredOutputs

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> object:
    match name:
        case "LLM":
            module = "baton.engine.llm"
        case "CompletionOutput" | "RequestOutput":
            module = "baton.engine.outputs"
        case "SamplingParams":
            module = "baton.request.params"
        case "StructuredOutputs":
            module = "baton.request.structured"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(module), name)
    return found
