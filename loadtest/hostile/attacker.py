"""One attack on a running ring.

    python -m loadtest.hostile.attacker NAME SECONDS < target.json > found.json

It is a process of its own, so that it has the protocol of the tree under attack, gives way to every other
process, and can be ended. Its findings up to the end of its time are printed.
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
"""The attacker's niceness: a real one has a machine of its own, so it must not take the cores of the attacked
ring."""


async def carry_out(attack: Attack, target: Target, max_s: float) -> Found:
    """Carry out the attack. Return its findings until its end, or until its time was over."""
    found = Found()
    try:
        async with asyncio.timeout(max_s):
            await attack.run(target, found)
    except TimeoutError:
        found.said = f"{found.said} (ended after {max_s:g} s)".strip()
    return found


def main() -> None:
    name, max_s = sys.argv[1], float(sys.argv[2])
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    os.nice(NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = uvloop.run(carry_out(ATTACKS[name], target, max_s))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
    os._exit(0)  # thousands of open streams need not be closed one by one


if __name__ == "__main__":
    main()
