"""Messages to a worker that are longer than its gRPC port accepts: split by the caller, joined by the worker.

gRPC has one bound of message size for a whole port, and applies it before the caller has proved anything. So
the bound is small, and longer messages (a request with a long prompt, or a prompt's log-probabilities) go in
parts, which are joined only after a greeting.

Pure: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from baton.v1.handoff_pb2 import PrefillMessage
from baton.v1.parts_pb2 import MessagePart
from baton.v1.worker_pb2 import RouterMessage

MAX_WHOLE_BYTES = 128 << 10
"""Most bytes of one message on a worker's port."""
PIECE_BYTES = MAX_WHOLE_BYTES - 64
"""The bytes of a long message that one part carries, besides the part's own fields."""

CONNECT = "/baton.v1.Worker/Connect"
LINK = "/baton.v1.Handoff/Link"
"""The methods whose callers may send parts, as gRPC names them."""

M = TypeVar("M", RouterMessage, PrefillMessage)


class MessagePartsError(DecodeError):
    """The parts of a message do not make a message. The text says why."""


class MessageTooLongError(MessagePartsError):
    """The parts of a message have more bytes in total than are allowed."""


def in_parts(message: M) -> Iterator[bytes]:
    """Yield what is sent for a message, serialized: the message, or its parts if it is too long."""
    whole = message.SerializeToString()
    if len(whole) <= MAX_WHOLE_BYTES:
        yield whole
        return
    kind = type(message)
    for begin in range(0, len(whole), PIECE_BYTES):
        end = begin + PIECE_BYTES
        part = MessagePart(data=whole[begin:end], last=end >= len(whole))
        yield kind(part=part).SerializeToString()


class Joiner(Generic[M]):
    """Joins the parts of messages that come on one stream."""

    def __init__(self, kind: type[M], most: int, unjoined: int = 0) -> None:
        """``most``: bytes of the longest message that is joined. ``unjoined``: the number of first messages
        of the stream that are passed on as they come, even if they are parts."""
        self._kind: type[M] = kind
        self._most = most
        self._unjoined = unjoined
        self._begun: bytearray | None = None
        """The bytes of a message whose last part has not come. None between messages."""

    def read(self, message: bytes) -> M | None:
        """Join a serialized message, like ``join``. Raises DecodeError for bytes that are no message."""
        return self.join(self._kind.FromString(message))

    def join(self, message: M) -> M | None:
        """Return the message that ``message`` completes, or None if more parts are to come. Nothing may be
        joined after an error. Raises MessagePartsError, and DecodeError for parts that make no message."""
        if self._unjoined:
            self._unjoined -= 1
            return message
        if message.HasField("part"):
            return self._add(message.part)
        if self._begun is not None:
            self._begun = None
            kind = message.WhichOneof("message")
            raise MessagePartsError(f"part: the last one of a message must come before {kind}")
        return message

    def _add(self, part: MessagePart) -> M | None:
        begun, data = self._begun or bytearray(), part.data
        self._begun = None
        size = len(begun) + len(data)
        if size > self._most:
            reason = f"part: the message has {size} bytes or more; at most {self._most} are allowed"
            raise MessageTooLongError(reason)
        begun += data
        if not part.last:
            self._begun = begun
            return None
        whole = self._kind.FromString(bytes(begun))
        if whole.HasField("part"):
            raise MessagePartsError("part: a message that comes in parts must not be a part itself")
        return whole
