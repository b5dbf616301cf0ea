"""What the planner knows of a ring at one moment. Pure data: where it comes from is others' business."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal, TypeAlias

ServingRole: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Workers of each role."""

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
    """Rates are means over so many seconds."""
    requests_per_s: float
    prompt_tokens_per_s: float
    """That prefill workers have to compute: neither found in a cache nor computed where the answer is
    written."""
    prompt_spread: float
    answer_tokens: float
    """Of one request, in the mean. 0: no answer has ended yet."""
    answer_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    """Of all prefill workers together, where not said otherwise."""

    tokens_per_s: float
    """Of one worker. 0: no prompt was computed yet."""
    waiting_tokens: float
    """Prompt tokens accepted and not computed, those that wait in front of the ring included."""
    before_s: float = 0.0
    """What a request's first token takes besides prefill and its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """Of all decode workers together, where not said otherwise."""

    step_base_s: float
    """A step of one worker with n sequences takes ``step_base_s + n * step_row_s``. 0: none was measured."""
    step_row_s: float
    blocks: float
    """KV blocks of one worker."""
    blocks_held: float
    running: float
    """Sequences that decode, or wait for room to."""
    step_s: float
    """What steps took in the mean, those that computed prompts as well included. 0: there were none."""
    step_rows: float
    """Sequences that a step decoded, in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Workers by what they serve as, and Deployments by what they are to hold."""

    ready: Counts
    """By the role that workers tell, and not draining."""
    switching: Counts
    """Workers on their way to a role."""
    replicas: Counts
    """That the Deployments ask for, by the role that their pods start with."""
    strays: Counts
    """Workers that serve, or are about to, as the role named here, of the other one's Deployment."""
    unable: Counts = NOBODY
    """Of ``ready``, those that are not to be asked to change the role named here, which they have."""

    @property
    def to_come(self) -> Counts:
        """By role, once every pod that was asked for is ready and every switch is done."""
        across = self.strays.prefill - self.strays.decode
        return Counts(prefill=self.replicas.prefill + across, decode=self.replicas.decode - across)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One look at the ring."""

    at_s: float
    """On a monotonic clock."""
    age_s: float
    """Since the oldest of the figures was true."""
    arrivals: Arrivals
    prefill: PrefillState
    decode: DecodeState
    fleet: Fleet

    def missing(self) -> str:
        """What a decision cannot do without and is not there, in words; empty if all is."""
        for part in (self.arrivals, self.prefill, self.decode):
            for field in fields(part):
                value = getattr(part, field.name)
                if not (isfinite(value) and value >= 0):
                    return f"{field.name} is {value}"
        if self.fleet.ready.total == 0:
            return "no worker is ready"
        return ""
