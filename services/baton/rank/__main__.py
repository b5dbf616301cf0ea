"""``python -m baton.rank --control FD --links FD``: started by ``baton.parallel.processes`` only."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import threading


def main() -> None:
    """Serves the leader at the other end of both sockets until that is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader may have to drain first
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="baton.rank")
    parser.add_argument("--control", type=int, required=True, metavar="FD")
    parser.add_argument("--links", type=int, required=True, metavar="FD")
    options = parser.parse_args()
    sock = socket.socket(fileno=options.control)
    links = socket.socket(fileno=options.links)
    # Before anything slow is imported, and whatever the other threads wait for.
    threading.Thread(target=_end_with_leader, args=(sock,), name="leader-watch", daemon=True).start()

    from baton.rank.program import run

    run(sock, links)


def _end_with_leader(sock: socket.socket) -> None:
    poll = select.poll()
    # A hangup is always reported; a leader that is gone on another node only with POLLRDHUP.
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(0)


main()
