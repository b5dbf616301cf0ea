"""What the sampling fields are that a request does not give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.options import StartError

AUTO, NONE = "auto", "none"
GENERATION_CONFIGS = (AUTO, NONE)
"""Heed the model's own file, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """OpenAI's, unless the model's publisher says otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, model: Path, generation_config: str) -> SamplingDefaults:
        """Those in the ``generation_config.json`` of the directory ``model``, if it has one and it is to be
        heeded. Like vLLM's, they hold whatever the file's ``do_sample`` says.

        StartError in a line for a person if the file is broken, or a value out of range.
        """
        file = model / "generation_config.json"
        if generation_config == NONE or not file.is_file():
            return cls()
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
        except (OSError, ValueError) as error:
            raise StartError(
                f"{file}: {error} (--generation-config {NONE} leaves the model's own sampling defaults out)"
            ) from None
        given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0  # both mean all
        return cls(**given)


class _GenerationConfig(msgspec.Struct):
    """What is heeded of the file, in the ranges that requests have (`baton.request.sampling`)."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
