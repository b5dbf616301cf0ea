"""What is done to a ring of two Deployments, one thing after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.support.rollout.fleet import ROLES, Fleet, Release

MAX_S = 300.0
"""Of one rollout."""
STALL_S = 15.0
"""For which a rollout that cannot go on is looked at."""


@dataclass(frozen=True, slots=True)
class Releases:
    """Revisions that a scenario goes between, and one whose pods are never ready."""

    old: Release
    new: Release
    stuck: Release


Scenario = Callable[[Fleet, Releases], Awaitable[None]]


async def one_after_the_other(fleet: Fleet, release: Release, order: tuple[str, ...]) -> None:
    for role in order:
        fleet.deployments[role].apply(release)
        await fleet.until_rolled(MAX_S)


async def prefill_then_decode(fleet: Fleet, releases: Releases) -> None:
    await one_after_the_other(fleet, releases.new, ("prefill", "decode"))


async def decode_then_prefill(fleet: Fleet, releases: Releases) -> None:
    await one_after_the_other(fleet, releases.new, ("decode", "prefill"))


async def both_at_once(fleet: Fleet, releases: Releases) -> None:
    """As ``helm upgrade`` does."""
    for role in ROLES:
        fleet.deployments[role].apply(releases.new)
    await fleet.until_rolled(MAX_S)


async def rollback_in_the_middle(fleet: Fleet, releases: Releases) -> None:
    """When all of prefill and the first of decode are new, everything goes back."""
    fleet.deployments["prefill"].apply(releases.new)
    await fleet.until_rolled(MAX_S)
    decode = fleet.deployments["decode"]
    decode.apply(releases.new)
    async with asyncio.timeout(MAX_S):
        while not any(  # noqa: ASYNC110
            each.revision == releases.new.revision and each.pod.ready for each in decode.live
        ):
            await asyncio.sleep(0.05)
    for role in ROLES:
        fleet.deployments[role].apply(releases.old)
    await fleet.until_rolled(MAX_S)


async def never_ready(fleet: Fleet, releases: Releases) -> None:
    """The rollout stalls with all old pods in service, and is taken back. AssertionError if it did not."""
    for role in ROLES:
        fleet.deployments[role].apply(releases.stuck)
    await asyncio.sleep(STALL_S)
    for deployment in fleet.deployments.values():
        assert not deployment.rolled, f"{deployment.role} went on with pods that are not ready"
        least = deployment.strategy.replicas - deployment.strategy.max_unavailable
        assert deployment.available >= least, f"{deployment.role}: {deployment.available} of {least} pods"
        deployment.apply(releases.old)
    await fleet.until_rolled(MAX_S)


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "prefill, then decode": prefill_then_decode,
        "both at once": both_at_once,
        "decode, then prefill": decode_then_prefill,
        "rollback in the middle": rollback_in_the_middle,
        "never ready": never_ready,
    }
)
