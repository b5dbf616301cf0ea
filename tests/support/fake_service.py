"""A child for the tests of the supervisor: says and does what it is told, and loads in no time.

Usage: fake_service.py NAME [--parent PID] ACTION..., with the actions taken in turn:
ready, progress, warn:TEXT, error:TEXT, raise, exit:CODE, sleep, stubborn (ignores SIGTERM), long-line,
once:FILE:ACTION (the action, the first time only), serve:PORT (a router that answers).
"""

from __future__ import annotations

import http.server
import logging
import signal
import sys
import time
from pathlib import Path

from baton.process import logs, ready
from baton.process.parent_death import exit_with_parent


class Router(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"data": [{"id": "fake"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for word in ("The ", "answer."):
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % word.encode())
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: object) -> None:
        pass


def act(action: str) -> None:
    verb, _, rest = action.partition(":")
    match verb:
        case "ready":
            ready.announce(ready.WorkerReady("127.0.0.1:1", "both"))
        case "progress":
            ready.announce(ready.Progress("load", 1, 2))
        case "sizes":
            ready.announce(ready.ChosenSizes(rest))
        case "warn":
            logging.getLogger("fake").warning(rest)
        case "error":
            print(f"error: {rest}", file=sys.stderr)
        case "raise":
            raise RuntimeError("a bug")
        case "exit":
            sys.exit(int(rest))
        case "sleep":
            time.sleep(60)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "long-line":
            print("x" * 3_000_000, flush=True)
        case "once":
            marker, _, then = rest.partition(":")
            if not Path(marker).exists():
                Path(marker).touch()
                act(then)
        case "serve":
            server = http.server.ThreadingHTTPServer(("127.0.0.1", int(rest)), Router)
            ready.announce(ready.RouterReady(f"127.0.0.1:{server.server_port}"))
            server.serve_forever()


if __name__ == "__main__":
    logs.configure("info")
    actions = sys.argv[2:]
    if actions[0] == "--parent":
        exit_with_parent(int(actions[1]))
        actions = actions[2:]
    for step in actions:
        act(step)
