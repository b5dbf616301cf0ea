"""An order to a worker to take another role, signed with an empty cluster key.

    python -m loadtest.hostile.forger 127.0.0.1:PORT

Exit status 0: the worker obeyed.
"""

from __future__ import annotations

import asyncio
import sys

from baton.greeting.cluster_key import ClusterKeys
from baton.planner.switch_role import SwitchError, switch_role
from loadtest.hostile.wire import loopback


def main() -> int:
    loopback(sys.argv[1])
    try:
        print(asyncio.run(switch_role(sys.argv[1], "prefill", ClusterKeys())))
    except SwitchError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
