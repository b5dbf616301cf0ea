"""What the planner knows of a ring at one moment. Pure data, whatever its source."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal, TypeAlias

ServingRole: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of workers of each role."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: ServingRole) -> int:
        return self.prefill if role == "prefill" else self.decode

    def plus(self, role: ServingRole, more: int) -> Counts:
        if role == "prefill":
            return Counts(prefill=self.prefill + more, decode=self.decode)
        return Counts(prefill=self.prefill, decode=self.decode + more)

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


NOBODY = Counts(prefill=0, decode=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What clients asked for lately. Spreads are standard deviations over means."""

    window_s: float
    """The time over which rates are averaged, in seconds."""
    requests_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens that prefill workers have to compute, per second: neither found in a cache nor computed
    by the decode worker."""
    prompt_spread: float
    answer_tokens: float
    """Mean output tokens of one request. 0: no answer has ended yet."""
    answer_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    """The state of all prefill workers together, unless a field says otherwise."""

    tokens_per_s: float
    """Prompt tokens per second of one worker. 0: no prompt was computed yet."""
    waiting_tokens: float
    """Prompt tokens accepted and not computed, those that wait in front of the ring included."""
    before_s: float = 0.0
    """The part of the TTFT besides prefill and its queue, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """The state of all decode workers together, unless a field says otherwise."""

    step_base_s: float
    """A step of one worker with n sequences takes ``step_base_s + n * step_row_s``. 0: none was measured."""
    step_row_s: float
    blocks: float
    """KV blocks of one worker."""
    blocks_held: float
    running: float
    """Sequences that decode, or wait for KV blocks to decode in."""
    step_s: float
    """Mean time of a step, steps that also computed prompts included. 0: there were no steps."""
    step_rows: float
    """Mean number of sequences that a step decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFleet:
    """Workers by the role that they serve, and the replicas of their Deployments."""

    ready: Counts
    """Workers that do not drain, by the role that they report."""
    switching: Counts
    """Workers that are switching, by their new role."""
    replicas: Counts
    """Replicas that the Deployments ask for, by the role that their pods start with."""
    strays: Counts
    """Workers that serve, or switch to, the role named here, and belong to the other role's Deployment."""
    unable: Counts = NOBODY
    """Workers of ``ready`` that must not be asked to switch, by their present role."""

    @property
    def to_come(self) -> Counts:
        """The workers of each role once every requested pod is ready and every switch is done."""
        across = self.strays.prefill - self.strays.decode
        return Counts(prefill=self.replicas.prefill + across, decode=self.replicas.decode - across)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement of the ring."""

    at_s: float
    """The time of the measurement on a monotonic clock."""
    age_s: float
    """The age of the oldest figure, in seconds."""
    arrivals: Arrivals
    prefill: PrefillState
    decode: DecodeState
    fleet: MeasuredFleet

    def missing(self) -> str:
        """Say in words which figure a decision needs and is missing; empty if none is."""
        for part in (self.arrivals, self.prefill, self.decode):
            for field in fields(part):
                value = getattr(part, field.name)
                if not (isfinite(value) and value >= 0):
                    return f"{field.name} is {value}"
        if self.fleet.ready.total == 0:
            return "no worker is ready"
        return ""
