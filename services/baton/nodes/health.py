"""The health page of a node that does not lead, for the kubelet: whether the node lives, and whether its
worker is ready."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from baton.net import sockets
from baton.process.options import StartError, join_address


class Health:
    """``/livez`` answers 200 while the process lives, ``/readyz`` once the worker is ready and 503 before."""

    def __init__(self) -> None:
        self.ready = False
        self.port: int | None = None
        """The port of the page; None: it is not served."""

    @classmethod
    @contextmanager
    def serving(cls, host: str, port: int) -> Iterator[Health]:
        """Serve the page on a port other than -1 (0: any free port). Raises StartError if the port cannot be
        had."""
        health = cls()
        if port < 0:
            yield health
            return
        try:
            server = _Server(sockets.listen(host, port), _handler(health))
        except OSError as error:
            raise StartError(f"cannot listen on {join_address(host, port)}: {error}") from error
        health.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
        thread.start()
        try:
            yield health
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    """A server on a listener that is already open."""

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_port = listener.getsockname()[1]


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            status = {"/livez": 200, "/readyz": 200 if health.ready else 503}.get(self.path, 404)
            body = {200: b"ok\n", 503: b"the worker is not ready\n"}.get(status, b"not found\n")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: kubelets ask every few seconds."""

    return Handler
