"""The values of sampling fields that a request does not give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.sampling_params import PARAMETERS
from baton.process.options import StartError

AUTO, NONE = "auto", "none"
GENERATION_CONFIGS = (AUTO, NONE)
"""The choices of ``--generation-config``: heed the model's own file, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The sampling defaults: OpenAI's, unless the model's publisher sets others."""

    temperature: float = PARAMETERS["temperature"].neutral
    top_p: float = PARAMETERS["top_p"].neutral
    top_k: int = PARAMETERS["top_k"].neutral
    min_p: float = PARAMETERS["min_p"].neutral
    repetition_penalty: float = PARAMETERS["repetition_penalty"].neutral

    @classmethod
    def of(cls, model: Path, generation_config: str) -> SamplingDefaults:
        """Read the defaults from the ``generation_config.json`` of the directory ``model``, if there is one
        and ``generation_config`` heeds it. As in vLLM, they hold whatever the file's ``do_sample`` says.

        Raises StartError, in one line for a person, if the file is broken, or a value out of range.
        """
        file = model / "generation_config.json"
        if generation_config == NONE or not file.is_file():
            return cls()
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
        except (OSError, ValueError, RecursionError) as error:
            raise StartError(
                f"{file}: {error} (--generation-config {NONE} leaves the model's own sampling defaults out)"
            ) from None
        given = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0  # -1 and 0 both mean all
        return cls(**given)


def _limits(name: str) -> Meta:
    """Return the range that requests have."""
    allowed = PARAMETERS[name].range
    if allowed.open:
        return Meta(gt=allowed.low, le=allowed.high)
    return Meta(ge=allowed.low, le=allowed.high)


class _GenerationConfig(msgspec.Struct):
    """The fields of the file that are heeded."""

    temperature: Annotated[float, _limits("temperature")] | None = None
    top_p: Annotated[float, _limits("top_p")] | None = None
    top_k: Annotated[int, _limits("top_k")] | None = None
    min_p: Annotated[float, _limits("min_p")] | None = None
    repetition_penalty: Annotated[float, _limits("repetition_penalty")] | None = None
