"""A cheap client of thousands of streams: no HTTP library, no event loop's transports, no parsing of bodies.

    python -m loadtest.routers.client URL... < plan.json > figures.json

The streams are dealt out to the URLs. The client asks in a closed loop: a stream that ends is followed by the
next one on the same connection. It counts events, and for some of the streams keeps when each event came.
"""

from __future__ import annotations

import gc
import re
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

CONNECT_S = 30.0
MAX_BYTES = 16 * 1024
"""Most bytes of one read."""
LOOK_S = 0.05
"""The time between looks at the clock while nothing comes, in seconds."""
_ID = re.compile(rb'"id":\s?"([^"]+)"')
_TEXT = re.compile(rb'"(?:text|content)":\s?"')


class Plan(msgspec.Struct, kw_only=True):
    """The requests to send, and for how long."""

    path: str = "/v1/completions"
    model: str = "demo"
    streams: int
    """The streams open at a time."""
    warm_up_s: float
    seconds: float
    """The time that is measured, after the warm-up."""
    prompt_words: int = 64
    max_tokens: int = 128
    stagger_s: float = 0.0
    """The time over which the streams begin."""
    sample: int = 17
    """One in this many streams is kept in full. It is no divisor of the number of workers: streams come to
    them in turns, and the kept ones would all be of a few workers, a whole frame or none."""
    headers: dict[str, str] = {}


class Figures(msgspec.Struct, kw_only=True):
    """The counts of the measured time."""

    events: int = 0
    """The events with text."""
    finished: int = 0
    failed: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = {}
    arrivals: dict[str, list[int]] = {}
    """The moments at which the tokens of kept streams came, by the id of the answer, in nanoseconds on the
    system's monotonic clock."""


@dataclass(slots=True, eq=False)
class Stream:
    """One connection, asking again and again."""

    load: Load
    number: int
    connection: socket.socket
    asked: int = 0
    head: bytes = b""
    """The head of the present answer, until it is whole."""
    in_head: bool = False
    kept: list[int] | None = None
    answer_id: str = ""
    tail: bytes = b""

    def ask(self) -> None:
        self.head, self.in_head, self.answer_id, self.tail = b"", True, "", b""
        self.kept = [] if self.number % self.load.plan.sample == 0 else None
        try:
            self.connection.sendall(self.load.request(self.number, self.asked))  # a few hundred bytes
        except ConnectionError:
            self.load.lost(self)
        self.asked += 1

    def read(self) -> None:
        """Read from a connection that has bytes, or has ended."""
        try:
            data = self.connection.recv(MAX_BYTES)
        except ConnectionError:
            data = b""
        now = time.monotonic_ns()
        if not data:
            self.load.lost(self)
            return
        if self.in_head:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.in_head = False
            status = head[9:12].decode()
            self.load.count(status)
            if status != "200":
                self.load.failed()
                self.load.leave(self)
                return
        self.take(data, now)

    def take(self, data: bytes, now: int) -> None:
        events = (
            data.count(b"\n\n") - data.count(b"data: [DONE]") if b"[DONE]" in data else data.count(b"\n\n")
        )
        if self.kept is not None:
            if not self.answer_id and (found := _ID.search(data)):
                self.answer_id = found[1].decode()
            self.kept += [now] * (events if self.load.measuring else 0)
        self.load.events(events)
        self.tail = (self.tail + data)[-24:]
        if b"[DONE]" in self.tail and self.tail.endswith(b"0\r\n\r\n"):
            self.load.finished(self)
            if not self.load.over:
                self.ask()


@dataclass(slots=True, eq=False)
class Load:
    """All streams of one run."""

    plan: Plan
    places: Sequence[tuple[str, int]]
    """Host and port of each server."""
    figures: Figures = field(default_factory=Figures)
    measuring: bool = False
    over: bool = False
    open: dict[int, Stream] = field(default_factory=dict)
    """The open streams by file descriptor."""
    poll: select.epoll = field(default_factory=select.epoll)

    def request(self, number: int, asked: int) -> bytes:
        plan = self.plan
        words = " ".join(f"w{(number * 7919 + asked * 104729 + i) % 9973}" for i in range(plan.prompt_words))
        said: dict[str, object] = {"prompt": words}
        if "chat" in plan.path:
            said = {"messages": [{"role": "user", "content": words}]}
        body = msgspec.json.encode(
            {"model": plan.model, "max_tokens": plan.max_tokens, "stream": True, "temperature": 0, **said}
        )
        more = "".join(f"{name}: {value}\r\n" for name, value in plan.headers.items())
        host, port = self.places[number % len(self.places)]
        head = (
            f"POST {plan.path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def count(self, status: str) -> None:
        if self.measuring:
            self.figures.statuses[status] = self.figures.statuses.get(status, 0) + 1

    def events(self, number: int) -> None:
        if self.measuring:
            self.figures.events += number

    def failed(self) -> None:
        if self.measuring:
            self.figures.failed += 1

    def finished(self, stream: Stream) -> None:
        if self.measuring:
            self.figures.finished += 1
        self._keep(stream)

    def _keep(self, stream: Stream) -> None:
        if stream.kept and stream.answer_id:
            self.figures.arrivals[stream.answer_id] = stream.kept

    def lost(self, stream: Stream) -> None:
        self.leave(stream)
        if not self.over:
            self.failed()

    def leave(self, stream: Stream) -> None:
        del self.open[stream.connection.fileno()]
        stream.connection.close()  # also takes it out of the poll

    def run(self) -> Figures:
        """Open the streams, and measure."""
        plan, began = self.plan, time.monotonic()
        for number in range(plan.streams):
            self.read_until(began + plan.stagger_s * number / plan.streams)
            self.begin(number)
        self.read_until(time.monotonic() + plan.warm_up_s)
        print("BEGIN", file=sys.stderr, flush=True)
        began, self.measuring = time.monotonic(), True
        self.read_until(began + plan.seconds)
        self.measuring, self.over = False, True
        self.figures.seconds = time.monotonic() - began
        print("END", file=sys.stderr, flush=True)
        for stream in list(self.open.values()):
            self._keep(stream)
            self.leave(stream)
        return self.figures

    def begin(self, number: int) -> None:
        connection = socket.create_connection(self.places[number % len(self.places)], CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = self.open[connection.fileno()] = Stream(self, number, connection)
        self.poll.register(connection, select.EPOLLIN)
        stream.ask()

    def read_until(self, until: float) -> None:
        """Read everything that comes until ``until``."""
        while (left := until - time.monotonic()) > 0:
            for fileno, _ in self.poll.poll(min(left, LOOK_S)):
                self.open[fileno].read()


def main() -> None:
    where = [urlsplit(url) for url in sys.argv[1:]]
    places = [(url.hostname or "", url.port or 80) for url in where]
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    gc.disable()  # a collection over all streams would be in their times
    figures = Load(plan, places).run()
    sys.stdout.buffer.write(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()
