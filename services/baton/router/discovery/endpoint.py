"""What discovery knows of one worker, and what the router asks of any way to discover them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from baton.router.placement import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One worker, as somebody else describes it: what it really is, it says itself on its stream.

    Two endpoints with the same ``address`` and another ``uid`` are two workers, the second of which was given
    the address of the first.
    """

    address: str
    """host:port of its gRPC server; an IPv6 host is in brackets."""
    uid: str = ""
    """Of its pod; empty where nobody gives one."""
    ready: bool = True
    """It may be given requests."""
    serving: bool = True
    """What it has, it can finish; false: its pod no longer passes its readiness check."""
    terminating: bool = False
    """It is being ended: what it has it finishes while it is ``serving``, and nothing new comes."""
    role: Role | None = None
    model: str = ""
    revision: str = ""
    zone: str = ""

    @property
    def admits(self) -> bool:
        """Whether it may be given new requests."""
        return self.ready and not self.terminating


Tell: TypeAlias = Callable[[Sequence[Endpoint]], None]
"""Takes the set of workers that are known now, all of them, whenever it has changed."""


class Discovery(Protocol):
    """A way to know the workers."""

    @property
    def known(self) -> Sequence[Endpoint]:
        """The set as it was told last, or as it is known before anything has run."""

    async def run(self, tell: Tell) -> None:
        """Tell the set of workers at once or as soon as it is known, then again after each change. Ends only
        by being cancelled; what goes wrong on the way is logged and tried again."""

    @property
    def staleness_s(self) -> float:
        """Seconds since the set was last confirmed; infinite as long as it never was."""
