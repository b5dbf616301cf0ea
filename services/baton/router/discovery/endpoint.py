"""A worker as discovery knows it, and the interface of discovery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from baton.core.role import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One worker, as discovery describes it. The worker's own description comes on its stream.

    Two endpoints with the same ``address`` and different ``uid`` are two workers, the second of which was
    given the address of the first.
    """

    address: str
    """``host:port`` of the worker's gRPC server. An IPv6 host is in brackets."""
    uid: str = ""
    """The uid of the worker's pod. Empty if there is none."""
    ready: bool = True
    """Whether the worker may be given requests."""
    serving: bool = True
    """Whether the worker can finish its requests. False: its pod no longer passes its readiness check."""
    terminating: bool = False
    """Whether the worker is being ended. It finishes its requests while it is ``serving``, and gets no new
    ones."""
    role: Role | None = None
    model: str = ""
    revision: str = ""
    zone: str = ""

    @property
    def admits(self) -> bool:
        """Whether the worker may be given new requests."""
        return self.ready and not self.terminating


Tell: TypeAlias = Callable[[Sequence[Endpoint]], None]
"""Takes the whole set of known workers, whenever it has changed."""


class Discovery(Protocol):
    """A source of the set of workers."""

    @property
    def known(self) -> Sequence[Endpoint]:
        """The last set told, or the set that is known before ``run``."""

    async def run(self, tell: Tell) -> None:
        """Tell the set of workers as soon as it is known, and again after each change. Runs until cancelled;
        failures are logged and retried."""

    @property
    def staleness_s(self) -> float:
        """The time since the set was last confirmed, in seconds. Infinite if it never was."""
