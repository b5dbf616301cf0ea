"""Files of the safetensors format: a header that names tensors, then their bytes.

https://huggingface.co/docs/safetensors/index#format"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from baton.hub import read_header
from baton.process.bounded_json import parse_json
from baton.process.options import ModelError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""The types of tensors that are read, by their names in headers."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says of one of its tensors."""

    dtype: str
    """The name of its type: one of ``DTYPES``, or one that is not read."""
    shape: torch.Size
    data: range
    """The bytes of the file that are its numbers."""

    @property
    def dtype_name(self) -> str:
        """The type as torch calls it, for a person."""
        found = DTYPES.get(self.dtype)
        return self.dtype if found is None else dtype_name(found)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file whose header is read."""

    path: Path
    tensors: Mapping[str, TensorHeader]
    """The headers by the names of the tensors, in the order of their bytes."""
    num_bytes: int
    """The size of the file."""

    @classmethod
    def of(cls, path: Path) -> WeightFile:
        """Read the header, and nothing else. ModelError if it does not describe the file."""
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                header = read_header(stream)
            return cls(path, _tensors(parse_json(header), 8 + len(header), size), size)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: truncated or corrupt ({error})") from error

    def read_into(self, name: str, memory: Tensor) -> bool:
        """Read a tensor into ``memory``, contiguous and of its shape. False, and nothing is read, if that is
        of another type or on a device."""
        found = self.tensors[name]
        if DTYPES.get(found.dtype) != memory.dtype or memory.device.type != "cpu":
            return False
        assert memory.is_contiguous() and memory.nbytes == len(found.data)
        numbers = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(found.data.start)
                while numbers:
                    taken = stream.readinto(numbers)
                    if not taken:
                        raise OSError(f"tensor {name} ends early")
                    numbers = numbers[taken:]
        except OSError as error:
            raise ModelError(f"{self.path}: truncated or corrupt ({error})") from error
        return True

    def tensor(self, name: str) -> Tensor:
        """A tensor, mapped, not read: its pages come in where it is read, and leave the process with it."""
        found = self.tensors[name]
        dtype = DTYPES.get(found.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: tensor {name} is {found.dtype}; allowed: {', '.join(DTYPES)}")
        if not found.data:
            return torch.empty(found.shape, dtype=dtype, device="cpu")
        before = found.data.start % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as stream:
                # Private, as torch has no tensors that cannot be written to; nobody writes to this one.
                mapped = mmap.mmap(
                    stream.fileno(),
                    before + len(found.data),
                    access=mmap.ACCESS_COPY,
                    offset=found.data.start - before,
                )
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: truncated or corrupt ({error})") from error
        return torch.frombuffer(mapped, dtype=dtype, count=found.shape.numel(), offset=before).view(
            found.shape
        )


def dtype_name(dtype: torch.dtype) -> str:
    """The type's name, for a person."""
    return str(dtype).removeprefix("torch.")


def _tensors(described: object, start: int, end: int) -> dict[str, TensorHeader]:
    """The headers of the tensors whose bytes are those from ``start`` to ``end`` of the file, in their order.
    ValueError if they are not all of these bytes, each once."""
    if not isinstance(described, dict):
        raise ValueError("the header is no JSON object")
    found = {name: _header(name, entry, start) for name, entry in described.items() if name != "__metadata__"}
    in_order = dict(sorted(found.items(), key=lambda item: (item[1].data.start, item[1].data.stop)))
    for name, header in in_order.items():
        if header.data.start != start:
            raise ValueError(f"tensor {name} begins at byte {header.data.start}, not at {start}")
        start = header.data.stop
    if start != end:
        raise ValueError(f"tensors end at byte {start}, the file at {end}")
    return in_order


def _header(name: str, entry: object, start: int) -> TensorHeader:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields, "shape"), _counts(fields, "data_offsets")
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name} has no dtype, shape and data_offsets")
    first, last = offsets
    taken = prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else max(0, last - first)
    if last - first != taken:
        raise ValueError(f"tensor {name} has bytes {first} to {last}, and its shape {taken} bytes")
    return TensorHeader(dtype, torch.Size(shape), range(start + first, start + last))


def _counts(fields: Mapping[str, object], name: str) -> list[int] | None:
    """A list of numbers from 0 on; None: the field is none."""
    values = fields.get(name)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        return None
    return values
