"""What the Deployment controller of Kubernetes does next in a rolling update, as a pure function.

As in kubernetes/pkg/controller/deployment/rolling.go: pods that terminate count for nothing; new ones are
made as far as maxSurge allows; of the old ones those that are not ready go first, then as many as are not
needed for replicas minus maxUnavailable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Member:
    """A pod that does not terminate."""

    name: str
    new: bool
    """Of the template that is wanted."""
    ready: bool


class Step(NamedTuple):
    """What is done now."""

    create: int
    delete: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Of one Deployment, with shares turned into pods: a surge rounded up, what may be missing down."""

    replicas: int
    max_surge: int
    max_unavailable: int

    @classmethod
    def of(cls, deployment: dict[str, Any]) -> Strategy:
        """Raises ValueError for one that recreates its pods."""
        spec = deployment["spec"]
        strategy = spec["strategy"]
        if strategy["type"] != "RollingUpdate":
            raise ValueError(f"strategy.type: must be RollingUpdate, not {strategy['type']}")
        replicas: int = spec["replicas"]
        given = strategy["rollingUpdate"]
        surge = _pods(given["maxSurge"], replicas, up=True)
        unavailable = _pods(given["maxUnavailable"], replicas, up=False)
        return cls(replicas, surge, unavailable if surge or unavailable else 1)

    def next(self, pods: Sequence[Member]) -> Step:
        new = [pod for pod in pods if pod.new]
        room = self.replicas + self.max_surge - len(pods)
        create = max(0, min(room, self.replicas - len(new)))
        delete = tuple(pod.name for pod in new[self.replicas :])
        return Step(create, delete + self._scale_down([pod for pod in pods if not pod.new], new))

    def _scale_down(self, old: Sequence[Member], new: Sequence[Member]) -> tuple[str, ...]:
        least = self.replicas - self.max_unavailable
        waiting = sum(not pod.ready for pod in new)
        most = len(old) + len(new) - least - waiting
        unready = [pod.name for pod in old if not pod.ready][: max(0, most)]
        spare = sum(pod.ready for pod in (*old, *new)) - least
        ready = [pod.name for pod in old if pod.ready][: max(0, min(spare, most - len(unready)))]
        return (*unready, *ready)


def _pods(given: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(given, int):
        return given
    share = int(given.removesuffix("%")) * replicas / 100
    return math.ceil(share) if up else math.floor(share)
