"""What ``baton models --check`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.worker.checkpoint import CheckedCheckpoint

MOST_SHOWN = 20
"""Problems that a person is shown; JSON has all."""


def as_lines(checked: CheckedCheckpoint) -> Iterator[str]:
    """The lines for a person."""
    found, memory = checked.inspection, checked.memory
    yield f"{found.config.architecture}: {checked.path}"
    yield f"  parameters  {found.num_parameters:,}; files of {_bytes(found.file_bytes)}"
    yield f"  weights     {found.scheme or 'plain'}; numbers are {_dtype(checked)}"
    for kept, number in found.matrices.items():
        yield f"              {number:,} matrices: {kept}"
    if found.matrices:
        yield f"              plain: {', '.join(found.plain)}"
    yield f"  context     {found.config.max_model_len:,} tokens"
    for number in range(len(found.ranks)):
        yield from _rank_lines(checked, number)
    used = "" if memory.fraction == 1 else f", {memory.fraction:.0%} of them used"
    yield f"  memory      {checked.where}: {_bytes(memory.num_bytes)}{used}"
    yield f"              {_verdict(checked)}"
    for problem in found.problems[:MOST_SHOWN]:
        yield f"  refused     {problem}"
    if len(found.problems) > MOST_SHOWN:
        yield f"              and {len(found.problems) - MOST_SHOWN:,} more"


def as_json(checked: CheckedCheckpoint) -> dict[str, object]:
    """One object with all of it; sizes are in bytes."""
    found, memory, room = checked.inspection, checked.memory, checked.capacity
    return {
        "path": str(checked.path),
        "architecture": found.config.architecture,
        "parameters": found.num_parameters,
        "files": {"number": found.num_files, "bytes": found.file_bytes},
        "quantization": {
            "scheme": found.scheme,
            "dtype": _dtype(checked),
            "matrices": dict(found.matrices),
            "plain": list(found.plain),
        },
        "max_model_len": found.config.max_model_len,
        "block_size": checked.block_size,
        "ranks": [
            {
                "tensor_parallel_rank": rank.shard.tp_rank,
                "stage": rank.shard.pp_rank,
                "weight_bytes": rank.num_bytes,
                "page_bytes": room.layouts[number].page_bytes,
                "kv": [asdict(kept) for kept in room.kept(number)],
                "sequence_bytes": room.sequence_bytes(number),
            }
            for number, rank in enumerate(found.ranks)
        ],
        "memory": {
            "device": checked.where,
            "bytes": memory.num_bytes,
            "fraction": memory.fraction,
            "kv_cache_bytes": room.pool_bytes,
            "pages": room.num_pages,
            "length": room.length,
            "sequences": room.num_sequences,
            "longest": room.longest,
            "holds": checked.holds,
        },
        "problems": list(found.problems),
    }


def _rank_lines(checked: CheckedCheckpoint, number: int) -> Iterator[str]:
    room = checked.capacity
    yield f"  rank {number:<6} weights: {_bytes(checked.inspection.ranks[number].num_bytes)}"
    for kept in room.kept(number):
        unit = "sequence" if kept.kind == "state" else "token"
        last = "" if kept.window is None else f", of the last {kept.window:,}"
        layers = f"{kept.num_layers} {kept.kind} layers"
        yield f"              KV of {layers}: {kept.num_bytes:,} bytes a {unit}{last}"
    size = _bytes(room.sequence_bytes(number))
    yield f"              a sequence of {room.length:,} tokens: {room.sequence_pages:,} pages, {size}"


def _verdict(checked: CheckedCheckpoint) -> str:
    room = checked.capacity
    if not room.num_pages:
        return "does not hold the weights and a KV cache"
    pool = f"a KV cache of {_bytes(room.pool_bytes)}"
    if not room.num_sequences:
        return f"holds the weights and {pool}: a sequence of {room.longest:,} tokens, not of {room.length:,}"
    less = "" if checked.memory.is_shared else ", less what steps take"
    many = "sequence" if room.num_sequences == 1 else "sequences"
    return f"holds the weights and {pool}: {room.num_sequences:,} {many} of {room.length:,} tokens{less}"


def _dtype(checked: CheckedCheckpoint) -> str:
    return str(checked.inspection.dtype).removeprefix("torch.")


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= size:
            return f"{number:,} bytes ({number / size:.2f} {unit})"
    return f"{number:,} bytes"
