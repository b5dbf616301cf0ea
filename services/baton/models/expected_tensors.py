"""The tensors that a checkpoint must have, compared with the headers of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.models.quantization.base import Place
from baton.models.weight_file import TensorHeader, WeightFile, dtype_name
from baton.process.options import ModelError


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """The places of a model's tensors, or of those of a rank's part of it."""

    of_rank: Mapping[str, Place]
    """The places that must be filled once."""
    shapes: Mapping[str, torch.Size]
    """The shapes of all tensors that may be in the files, those of other ranks too."""
    owner: str
    """The owner of the places, in errors."""
    name_of: Callable[[str], str] = lambda name: name
    """The name by which a tensor in a file has its place."""
    harmless: Callable[[WeightFile, str], bool] = lambda file, name: False
    """Whether a tensor in a file needs no place."""


class ExpectedTensors:
    """The tensors that are still to come from the files in a directory."""

    def __init__(self, places: TensorPlaces, path: Path) -> None:
        self._places = places
        self._path = path
        self._waiting = dict(places.of_rank)

    def place_of(self, file: WeightFile, found: str, header: TensorHeader) -> Place | None:
        """The place of a tensor in a file; None: it is another rank's, or harmless. ModelError if it has
        none, comes a second time, or has another shape or type."""
        places, name = self._places, self._places.name_of(found)
        if name in self._waiting:
            place = self._waiting.pop(name)
            _check(file.path, found, header, place, places.shapes[name])
            return place
        if name in places.of_rank:
            raise ModelError(f"{file.path}: tensor {found} comes a second time")
        if name not in places.shapes and not places.harmless(file, found):
            raise ModelError(f"{file.path}: {places.owner} has no place for tensor {found}")
        return None

    def shape_of(self, found: str) -> torch.Size:
        """The shape in which the place of a tensor in a file takes it."""
        return self._places.shapes[self._places.name_of(found)]

    def check_all_came(self) -> None:
        """ModelError if a tensor is missing that has to be there."""
        missing = [name for name, place in self._waiting.items() if not place.is_optional]
        if missing:
            first, more = min(missing), len(missing) - 1
            also = f", and {more} more" if more else ""
            raise ModelError(f"{self._path}: tensor {first} is missing{also}")


def _check(file: Path, name: str, header: TensorHeader, place: Place, shape: torch.Size) -> None:
    if not place.fits(header.shape, shape):
        found, expected = list(header.shape), list(shape)
        raise ModelError(f"{file}: tensor {name} has shape {found}; expected {expected}")
    allowed = [*map(dtype_name, place.dtypes)]
    if header.dtype_name not in allowed:
        raise ModelError(f"{file}: tensor {name} is {header.dtype_name}; allowed: {', '.join(allowed)}")
