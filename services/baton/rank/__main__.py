"""``python -m baton.rank --control FD --links FD``: started by ``baton.parallel.ranks`` only."""

from __future__ import annotations

import argparse
import signal
import socket


def main() -> None:
    """Serves the leader at the other end of both sockets until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader says when it is over
    parser = argparse.ArgumentParser(prog="baton.rank")
    parser.add_argument("--control", type=int, required=True, metavar="FD")
    parser.add_argument("--links", type=int, required=True, metavar="FD")
    options = parser.parse_args()
    sock = socket.socket(fileno=options.control)
    links = socket.socket(fileno=options.links)

    from baton.rank.program import run

    run(sock, links)


main()
