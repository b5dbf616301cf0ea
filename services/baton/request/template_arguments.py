"""The checks of a chat's own template variables."""

from __future__ import annotations

from baton.request.errors import invalid
from baton.request.sizes import check_json_bytes
from baton.text.config import Json

PARAM = "chat_template_kwargs"
MAX_BYTES = 256 * 1024
"""Most bytes of all variables together, as JSON: as many as for tools, which documents resemble."""

_FIELDS = ("messages", "tools", "add_generation_prompt")
"""Variables that are fields of the request, which have limits of their own."""
_SPECIAL = frozenset(
    {f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")}
    | {"additional_special_tokens"}
)
"""Variables that only the model's tokenizer sets."""


def template_arguments(given: dict[str, object] | None) -> dict[str, Json] | None:
    """Return the variables that a request gives the template. Raises RequestError for variables that clients
    may not give, and for too many bytes."""
    if given is None:
        return None
    for name in _FIELDS:
        if name in given:
            raise invalid(
                f"{PARAM}.{name}", f"{PARAM}.{name} is not allowed; {name} is a field of the request itself."
            )
    for name in given:
        if name in _SPECIAL:
            raise invalid(
                f"{PARAM}.{name}", f"{PARAM}.{name} is not allowed; the model's tokenizer tells it."
            )
    check_json_bytes(PARAM, given, MAX_BYTES)
    return given  # type: ignore[return-value]  # decoded from JSON, which msgspec's types cannot say
