"""The way a tokenizer holds the markers of a model's formats, compared with published ones at the start."""

from __future__ import annotations

from baton.text.tokenizer import Tokenizer
from baton.tools.formats import ReasoningFormat, ToolFormat


def marker_faults(tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None) -> list[str]:
    """Return what is unlike published tokenizers about the markers of ``formats``, a sentence each. Calls or
    reasoning may not be found then, or be forced in a spelling that the model never saw."""
    found: list[str] = []
    for format_ in formats:
        if format_ is not None:
            found += _faults(tokenizer, format_)
    return found


def _faults(tokenizer: Tokenizer, format_: ToolFormat | ReasoningFormat) -> list[str]:
    markers = sorted(format_.markers)
    found = []
    for marker in markers:
        written = tokenizer.decode(tokenizer.encode(marker, False), skip_special_tokens=False)
        if written != marker:
            found.append(f"The tokenizer cannot write the marker {marker}: it becomes {written!r}.")
    tokens = tokenizer.named_among(markers)
    spelled = [marker for marker in markers if marker not in tokens]
    if tokens and spelled:
        found.append(
            f"The tokenizer has a token for the marker {' and '.join(sorted(tokens))}, but not for "
            f"{' and '.join(spelled)}; published ones have tokens for all of them, or for none."
        )
    if isinstance(format_, ToolFormat) and format_.special:
        found += [
            f"The marker {marker} is not a special token, as in the published tokenizers of its family."
            for marker in markers
            if tokens.get(marker) not in tokenizer.special.ids
        ]
    return found
