"""The sampling parameters of a gRPC call, as the fields of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from baton.core.sampling_params import SamplingFields
from baton.v1 import inference_pb2 as pb

_EARLY_STOPPING: Mapping[int, bool | str] = MappingProxyType(
    {pb.EARLY_STOPPING_UNSPECIFIED: False, pb.EARLY_STOPPING_ALWAYS: True, pb.EARLY_STOPPING_NEVER: "never"}
)


def sampling_fields(params: pb.SamplingParams) -> SamplingFields:
    """Return the fields of the same name, and those of the beam search, whose width is ``best_of``. Fields
    that the message lacks are not given; neither is a ``max_tokens`` of 0 or an empty list."""
    given: dict[str, Any] = {"use_beam_search": False}
    for field, value in params.ListFields():
        if field in _READERS:
            name, read = _READERS[field]
            given[name] = value if read is None else read(value)
    if params.HasField("beam_search"):
        given |= _beam_fields(params.beam_search)
    return SamplingFields(**given)


def _beam_fields(beams: pb.BeamSearch) -> dict[str, Any]:
    return {
        "use_beam_search": True,
        "best_of": beams.width,
        "length_penalty": beams.length_penalty if beams.HasField("length_penalty") else None,
        "early_stopping": _EARLY_STOPPING.get(beams.early_stopping, str(beams.early_stopping)),
    }


def _keyed_by_text(values: Mapping[int, float]) -> dict[str, float]:
    """Return ``values`` with keys of text, as JSON has no others."""
    return {str(key): value for key, value in values.items()}


def _reader(field: FieldDescriptor) -> Callable[[Any], object] | None:
    """Return the function from a protobuf field's value to JSON's; None if they are the same."""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return _keyed_by_text
    return list if field.is_repeated else None


_READERS = MappingProxyType(
    {
        field: (field.name, _reader(field))
        for field in pb.SamplingParams.DESCRIPTOR.fields
        if field.name in SamplingFields.__struct_fields__
    }
)
"""The protobuf fields that JSON has by the same name."""
