"""A hub of models on this machine, which has one model: the files of a directory, one after the other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAUSE_S = 0.2
"""Longer than the client's bars wait between two looks."""


@contextmanager
def fake_hub(name: str, directory: Path) -> Iterator[str]:
    """The address of a hub that has the model ``name``, in revision ``main``."""
    handler = type("Handler", (_Handler,), {"name": name, "directory": directory})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    name: ClassVar[str]
    directory: ClassVar[Path]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/{self.name}/revision/main":
            siblings = [{"rfilename": file.name} for file in self._files()]
            self._send_json({"id": self.name, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/api/models/{self.name}/tree/"):
            self._send_json([_entry(file) for file in self._files()])
        elif path.startswith(f"/{self.name}/resolve/"):
            self._send_file(self.directory / path.rpartition("/")[2], with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _files(self) -> list[Path]:
        return sorted(file for file in self.directory.iterdir() if file.is_file())

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, file: Path, with_body: bool) -> None:
        body = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        time.sleep(PAUSE_S * self._files().index(file))
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


def _entry(file: Path) -> dict[str, object]:
    body = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
