"""The types that attacks, attackers and the judge exchange."""

from __future__ import annotations

import math
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
    """The API keys by tenant; empty: the ring has no keys."""
    workers: list[Place]
    router_log: str
    recorded: str = ""
    """The file of what the router sent to the first worker, from the beginning of the connection on."""

    def of_role(self, role: str) -> Place:
        return next(place for place in self.workers if place.role == role)


class Found(msgspec.Struct, kw_only=True):
    """The result of an attacker."""

    got: dict[str, int] = {}
    """The number of answers, by status or end of the connection."""
    figures: dict[str, float] = {}
    """The figures that the aim is read from; names end in the unit."""
    said: str = ""

    def count(self, ending: str | int) -> None:
        self.got[str(ending)] = self.got.get(str(ending), 0) + 1

    def figure(self, name: str) -> float:
        """Return a figure, or 0 where the attacker did not get so far."""
        return self.figures.get(name, 0.0)


class Watched(msgspec.Struct, kw_only=True):
    """The resources that the processes under attack used, as the system counts them. Sizes are MiB."""

    rss_before: float = 0.0
    rss_peak: float = 0.0
    """The peak of the router's own process."""
    children_peak: float = 0.0
    """The peak of the processes that the router has started, together, at one moment."""
    whole_peak: float = 0.0
    """The peak of the router and its children, at one moment."""
    descriptors_peak: int = 0
    router_cpu_s: float = 0.0
    worker_grew: float = 0.0
    """The growth of the worker that grew most."""
    worker_threads_grew: int = 0
    router_log_bytes: int = 0
    """The bytes that the router logged during the attack."""
    ended: list[str] = []
    """Processes that ended."""

    @property
    def rss_grew(self) -> float:
        return self.rss_peak - self.rss_before


class Felt(msgspec.Struct, kw_only=True):
    """The harm to honest clients and probes. Times are seconds; NaN: there was nothing to measure."""

    itl_calm: float = math.nan
    """The time between two tokens of a stream: the 99th percentile before the attack."""
    itl: float = math.nan
    """The time between two tokens of a stream: the 99th percentile from the attack's beginning until the
    recovery's end."""
    itl_most: float = math.nan
    ttft_calm: float = math.nan
    ttft: float = math.nan
    probe_calm: float = math.nan
    """The wait of a probe on a connection that stays open: the 99th percentile before the attack."""
    probe: float = math.nan
    requests: int
    failed: dict[str, int] = {}
    """The number of failed requests by reason."""
    silence_calm: float
    """The longest wait for the answer to a probe on a connection that stays open, before the attack."""
    silence: float
    probes_failed: int
    """Probes on a connection of their own that got no answer in time."""
    turn: float
    """The longest turn of the event loop by the router's own metric; NaN: it has none."""
    own_turn: float
    """The longest turn without the router's waits for a processor, which attackers, honest clients and
    workers use too; NaN: there is no such metric."""

    @property
    def ratio(self) -> float:
        return self.itl / self.itl_calm if self.itl_calm else float("nan")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An attack's changes to the usual ring of a prefill and a decode worker."""

    keys: bool = True
    descriptors: int | None = None
    """Most file descriptors of the router; None: the system's limit."""
    router: tuple[str, ...] = ()
    """More options of the router, in which ``{tmp}`` is a folder of the ring's own."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Files in that folder, by name."""
    stranger: bool = False
    """Whether there is a third worker, which serves another model."""
    template: str = ""
    """The router's chat template; empty: the demo model's."""
    real: bool = False
    """Whether the workers have the demo model, and do not only pretend."""
    recorded: bool = False
    """Whether the router calls the first worker through a proxy that records what it sends."""


Run: TypeAlias = Callable[[Target, Found], Awaitable[None]]
"""An attack's function. It writes its findings as they come: an attack may be ended at any time."""
Reached: TypeAlias = Callable[[Found, Watched, Felt], bool]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack on a running ring."""

    name: str
    finding: str
    """The finding of the review that it shows, S1 to S19; empty: there was none."""
    aim: str
    """The aim that the attack must reach to have worked."""
    run: Run
    reached: Reached
    setup: Setup = field(default_factory=Setup)
    max_s: float = 20.0
    """The time after which it is ended, in seconds."""
    loads: bool = False
    """Whether it gives the workers more to do than the calm, as each tenant may: then the time between honest
    tokens is not judged by the calm's."""

    @property
    def shown(self) -> bool:
        """Whether the attack worked before the finding was fixed."""
        return bool(self.finding)


Trying: TypeAlias = Callable[[Path, Path], Found]
"""A trial's function, called with the source tree and a folder for files."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial on processes of its own, without honest clients."""

    name: str
    finding: str
    aim: str
    run: Trying
    reached: Callable[[Found], bool]
    needs: str = ""
    """A program that must be installed."""

    @property
    def shown(self) -> bool:
        """Whether the trial reached its aim before the finding was fixed."""
        return bool(self.finding)
