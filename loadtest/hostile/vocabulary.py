"""What attacks, those who carry them out and the judge say to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

MIB = 1 << 20


class Place(msgspec.Struct, kw_only=True):
    """A worker under attack. Addresses are ``host:port`` on loopback."""

    name: str
    role: str
    grpc: str
    data: str
    metrics: str
    log: str
    """The path of its log."""


class Target(msgspec.Struct, kw_only=True):
    """A ring under attack, as an attacker is told of it."""

    http: str
    grpc: str
    keys: dict[str, str]
    """Tenant → API key; empty: the ring asks for none."""
    workers: list[Place]
    router_log: str
    recorded: str = ""
    """The file of what the router said to the first worker, from the beginning of the connection on."""

    def of_role(self, role: str) -> Place:
        return next(place for place in self.workers if place.role == role)


class Found(msgspec.Struct, kw_only=True):
    """What an attacker got."""

    got: dict[str, int] = {}
    """Statuses and ends of connections → how often."""
    figures: dict[str, float] = {}
    """What the aim is read from; names end in the unit."""
    said: str = ""

    def count(self, ending: str | int) -> None:
        self.got[str(ending)] = self.got.get(str(ending), 0) + 1

    def figure(self, name: str) -> float:
        """0 where the attacker did not get so far."""
        return self.figures.get(name, 0.0)


class Watched(msgspec.Struct, kw_only=True):
    """What the processes under attack used, as the system counts it. Sizes are MiB."""

    rss_before: float = 0.0
    rss_peak: float = 0.0
    """Of the router's own process."""
    children_peak: float = 0.0
    """Of the processes that it has started, together, at one moment."""
    whole_peak: float = 0.0
    """Of both, at one moment."""
    descriptors_peak: int = 0
    router_cpu_s: float = 0.0
    worker_grew: float = 0.0
    """Of the worker that grew most."""
    worker_threads_grew: int = 0
    router_log_bytes: int = 0
    """Written while the attack went on."""
    ended: list[str] = []
    """Processes that ended."""

    @property
    def rss_grew(self) -> float:
        return self.rss_peak - self.rss_before


class Felt(msgspec.Struct, kw_only=True):
    """What honest clients and probes felt. Times are seconds; NaN: there was nothing to measure."""

    itl_calm: float
    """Between two tokens of a stream: the 99th percentile before the attack."""
    itl: float
    """Likewise from its beginning until everything had recovered."""
    itl_most: float
    ttft_calm: float
    ttft: float
    requests: int
    failed: dict[str, int] = {}
    """Why → how many requests failed."""
    silence_calm: float
    """Longest wait for the answer to a probe on a connection that stays open."""
    silence: float
    probes_failed: int
    """Probes on a connection of their own that got no answer in time."""
    turn: float
    """The longest turn of the event loop by the router's own metric; NaN: it has none."""
    own_turn: float
    """Without what the router waited for a processor, which attackers, honest clients and workers use too;
    NaN: there is no such metric."""

    @property
    def ratio(self) -> float:
        return self.itl / self.itl_calm if self.itl_calm else float("nan")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The ring that an attack needs beside the usual one of a prefill and a decode worker."""

    keys: bool = True
    descriptors: int | None = None
    """That the router may have; None: what everybody may."""
    router: tuple[str, ...] = ()
    """More options, in which ``{tmp}`` is a folder of the ring's own."""
    files: tuple[tuple[str, bytes], ...] = ()
    """To be in that folder."""
    stranger: bool = False
    """There is a third worker, which serves another model."""
    recorded: bool = False
    """The router calls the first worker through a proxy that writes down what it says."""


Run: TypeAlias = Callable[[Target, Found], Awaitable[None]]
"""What was found is written down as it is: an attack may be ended at any time."""
Reached: TypeAlias = Callable[[Found, Watched, Felt], bool]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Something that is done to a running ring."""

    name: str
    finding: str
    """Of the review: S1 to S19; empty: there was none."""
    aim: str
    """What it is to have reached to have worked."""
    run: Run
    reached: Reached
    setup: Setup = field(default_factory=Setup)
    most_s: float = 20.0
    """It is ended then."""

    @property
    def shown(self) -> bool:
        """Whether it worked before it was found."""
        return bool(self.finding)


Trying: TypeAlias = Callable[[Path, Path], Found]
"""With the source tree and a folder for files."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Something that is tried on processes of its own, without honest clients."""

    name: str
    finding: str
    aim: str
    run: Trying
    reached: Callable[[Found], bool]
    needs: str = ""
    """A program that must be there."""

    @property
    def shown(self) -> bool:
        """As of an attack."""
        return bool(self.finding)
