"""A rank whose device has no room: takes the place of ``baton.rank``."""

from __future__ import annotations

import socket
import sys

from baton.parallel.channel import to_leader
from baton.parallel.messages import RankFailed, Start

channel = to_leader(socket.socket(fileno=int(sys.argv[sys.argv.index("--control") + 1])))
message, _ = channel.receive()
assert isinstance(message, Start)
channel.send(RankFailed("no room for the weights"))
sys.exit(70)
