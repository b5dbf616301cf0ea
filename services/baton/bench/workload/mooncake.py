"""Traces in the format that Mooncake published: one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from baton.bench.workload.files import at_line, numbered_lines
from baton.bench.workload.items import Item, PromptPiece, WorkloadError

BLOCK = 512
"""Tokens that one hash id stands for."""

_MAX_TOKENS = 10_000_000


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # milliseconds
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)]
    hash_ids: list[int]


def read_mooncake(path: Path, count: int, seed: int) -> list[Item]:
    """Read the first ``count`` requests of a trace. Equal hash ids become equal blocks of 512 tokens; a
    prompt's last block is cut to the rest. Raises WorkloadError that names the line."""
    decoder = msgspec.json.Decoder(_Line)
    items: list[Item] = []
    first = 0.0
    for number, text in numbered_lines(path):
        if len(items) == count:
            break
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise at_line(path, number, str(error)) from None
        blocks = -(-line.input_length // BLOCK)
        if len(line.hash_ids) != blocks:
            problem = f"hash_ids has {len(line.hash_ids)} entries; {line.input_length} tokens have {blocks}"
            raise at_line(path, number, problem)
        first = first if items else line.timestamp
        if line.timestamp < first:
            raise at_line(path, number, f"timestamp {line.timestamp:g} is before the first, {first:g}")
        items.append(_item(line, seed, (line.timestamp - first) / 1e3))
    if not items:
        raise WorkloadError(f"{path}: holds no request")
    return items


def _item(line: _Line, seed: int, at: float) -> Item:
    lengths = [BLOCK] * (len(line.hash_ids) - 1)
    lengths.append(line.input_length - sum(lengths))
    prompt = tuple(
        PromptPiece(f"{seed}-block-{id_}", tokens) for id_, tokens in zip(line.hash_ids, lengths, strict=True)
    )
    return Item(prompt, line.input_length, line.output_length, at)
