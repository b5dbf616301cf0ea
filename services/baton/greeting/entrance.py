"""A worker's side of greetings over gRPC: callers without the cluster key are refused."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.places import NoPlaceError, Places
from baton.greeting.proofs import GREETING_S, Called, Kind, MalformedGreetingError, WrongProofError
from baton.net.rare_log import RareLog
from baton.v1.greeting_pb2 import Challenge
from baton.v1.handoff_pb2 import PrefillMessage
from baton.v1.worker_pb2 import RouterMessage

log = logging.getLogger(__name__)

MAX_UNPROVED = 128
"""Most streams of one service of a worker whose callers have not proved anything yet."""
MAX_UNPROVED_FROM_ONE = 32
"""Most unproved streams from one address. A refused caller calls again within a second, and a greeting takes
milliseconds."""

M = TypeVar("M", RouterMessage, PrefillMessage)
Say = Callable[[Challenge], Awaitable[None]]


class CallerRefusedError(Exception):
    """A caller is refused. ``status`` and the text are sent to the caller."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class CallerLeftError(CallerRefusedError):
    """A stream has ended before its greeting was whole, as the stream of a probe does that only asks which
    worker is here. It is not counted."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.UNAUTHENTICATED, "the stream ended before its greeting was whole")


class Entrance:
    """The callee's side of the greetings of one service of a worker. Event loop's thread only."""

    def __init__(self, keys: ClusterKeys, kind: Kind, greeting_s: float = GREETING_S) -> None:
        self.refused: Counter[str] = Counter()
        """Callers refused since the start, by the name of their status."""
        self._keys = keys
        self._kind = kind
        self._greeting_s = greeting_s
        self._places = Places(MAX_UNPROVED, MAX_UNPROVED_FROM_ONE)
        self._rare = RareLog(log, "callers")

    @property
    def unproved(self) -> int:
        """Streams whose greeting is under way."""
        return self._places.taken

    async def admit(self, messages: AsyncIterator[M], peer: str, incarnation: str, say: Say) -> str:
        """Return the caller's name, once the caller has proved that it has the cluster key.

        ``messages``: the caller's messages, none of them read yet. ``peer``: the caller's address, as gRPC
        names it. ``incarnation``: the worker's. ``say`` sends a challenge. Raises CallerRefusedError.
        """
        try:
            with self._places.one_for(peer):
                async with asyncio.timeout(self._greeting_s):
                    return await self._proved(messages, incarnation, say)
        except NoPlaceError as error:
            raise CallerRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"greeting: {error}") from None
        except TimeoutError:
            reason = f"the greeting took longer than {self._greeting_s:g} s"
            raise CallerRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from None
        except MalformedGreetingError as error:
            raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"greeting.{error}") from None
        except WrongProofError as error:
            raise CallerRefusedError(grpc.StatusCode.PERMISSION_DENIED, str(error)) from None

    async def next_of(self, messages: AsyncIterator[M], field: str, kind: str) -> M:
        """Return the message that follows the greeting. It must have ``field``; ``kind`` names it in errors.
        Raises CallerRefusedError."""
        try:
            async with asyncio.timeout(self._greeting_s):
                message = await anext(messages, None)
        except TimeoutError:
            reason = f"no {kind} came within {self._greeting_s:g} s"
            raise CallerRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from None
        if message is None or not message.HasField(field):  # type: ignore[arg-type]  # a name of either kind
            reason = f"the message after the greeting must be {kind}"
            raise CallerRefusedError(grpc.StatusCode.INVALID_ARGUMENT, reason)
        return message

    def wrong_name(self, field: str) -> CallerRefusedError:
        """Return the refusal of a caller whose name in ``field`` is not the one it has greeted by."""
        reason = f"{field}: must be the name that this {self._kind} has greeted by"
        return CallerRefusedError(grpc.StatusCode.PERMISSION_DENIED, reason)

    async def _proved(self, messages: AsyncIterator[M], incarnation: str, say: Say) -> str:
        first = await _next(messages)
        if not first.HasField("greeting"):
            raise _unproved(f"the first message must be a Greeting: is the {self._kind} of an older release?")
        called = Called(self._keys, self._kind, incarnation, first.greeting)
        await say(called.challenge)
        second = await _next(messages)
        if not second.HasField("proof"):
            raise _unproved("the second message must be a Proof")
        called.check(second.proof)
        return first.greeting.name

    def count(self, peer: str, refusal: CallerRefusedError) -> None:
        """Count a refusal sent to the caller at ``peer``, and log it at most once in a while."""
        if isinstance(refusal, CallerLeftError):
            return
        self.refused[refusal.status.name] += 1
        self._rare.warn("a %s at %s was refused: %s", self._kind, peer, refusal)


async def _next(messages: AsyncIterator[M]) -> M:
    message = await anext(messages, None)
    if message is None:
        raise CallerLeftError
    return message


def _unproved(reason: str) -> CallerRefusedError:
    return CallerRefusedError(grpc.StatusCode.UNAUTHENTICATED, reason)
