"""A server that a command starts, as a person would type it, and the first answer that it streams."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

QUESTION = "What is Baton?"
_LOG_TAIL = 40


class NoAnswerError(Exception):
    """The server ended, or did not answer in time; with the end of its log."""


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """A streamed answer, and when it came."""

    began_s: float
    """Seconds from the command to the first token."""
    ended_s: float
    """Seconds from the command to the end of the stream."""
    text: str
    num_events: int
    """Events of the stream that carried text."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class Served:
    """A server that is ready on ``port`` of this machine."""

    def __init__(self, port: int, began: float, deadline: float) -> None:
        self.port = port
        self._began = began
        self._deadline = deadline

    def ask(self) -> FirstAnswer:
        """Ask ``QUESTION`` of the only model. Raises NoAnswerError."""
        url = f"http://127.0.0.1:{self.port}/v1"
        with urllib.request.urlopen(f"{url}/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
        body = {"model": model, "stream": True, "temperature": 0, "max_tokens": 48}
        body["messages"] = [{"role": "user", "content": QUESTION}]
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        first = None
        pieces: list[str] = []
        left = max(1.0, self._deadline - time.monotonic())
        with urllib.request.urlopen(request, timeout=left) as response:
            for line in response:
                text = _text_of(line.decode())
                if text:
                    first = first or time.monotonic()
                    pieces.append(text)
        if first is None:
            raise NoAnswerError("the stream had no text")
        return FirstAnswer(first - self._began, time.monotonic() - self._began, "".join(pieces), len(pieces))


@contextmanager
def served(
    command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str], patience_s: float
) -> Iterator[Served]:
    """Start ``command`` in ``folder``, wait until it serves on ``port``, and stop it afterwards.

    Raises NoAnswerError if it ends or is not ready in ``patience_s`` seconds.
    """
    began = time.monotonic()
    deadline = began + patience_s
    with _started(command, folder, environment) as (process, log):
        while not _is_ready(port):
            if process.poll() is not None:
                raise NoAnswerError(f"{command[0]} ended with status {process.returncode}\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise NoAnswerError(f"not ready within {patience_s:.0f} s\n{_tail(log)}")
            time.sleep(0.1)
        yield Served(port, began, deadline)


@contextmanager
def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = folder / "server.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, path
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process and its children as Ctrl-C does, and by force what is left after 20 seconds."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _text_of(line: str) -> str:
    """Return the text of a server-sent event of the chat API; empty where it has none."""
    _, marker, data = line.strip().partition("data: ")
    if not marker or data == "[DONE]":
        return ""
    choices = json.loads(data)["choices"]
    return str(choices[0]["delta"].get("content") or "") if choices else ""


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
