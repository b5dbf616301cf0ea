"""One attack on a ring that runs.

    python -m loadtest.hostile.attacker NAME SECONDS < target.json > found.json

A process of its own: it has the protocol of the tree under attack, gives way to everybody else, and can be
ended. What it had found when its time was over is told.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import msgspec
import uvloop

from loadtest.hostile.catalogue import ATTACKS
from loadtest.hostile.vocabulary import Attack, Found, Target

NICE = 5
"""An attacker has a machine of its own: it is not to take the cores of those it attacks."""


async def carry_out(attack: Attack, target: Target, most_s: float) -> Found:
    """What it found until its end, or until its time was over."""
    found = Found()
    try:
        async with asyncio.timeout(most_s):
            await attack.run(target, found)
    except TimeoutError:
        found.said = f"{found.said} (ended after {most_s:g} s)".strip()
    return found


def main() -> None:
    name, most_s = sys.argv[1], float(sys.argv[2])
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    os.nice(NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = uvloop.run(carry_out(ATTACKS[name], target, most_s))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
    os._exit(0)  # thousands of open streams need not be closed one by one


if __name__ == "__main__":
    main()
