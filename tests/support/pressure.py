"""Requests that keep coming: enough to see a ring at work, no measurement."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

WORDS = ("baton", "relay", "prefill", "decode", "token", "block", "cache", "queue", "handoff", "ring")


class Pressure:
    """What became of the requests, by status; 0: the connection ended."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.stopped = threading.Event()

    def wait(self, answers: int, seconds: float) -> None:
        """Until so many were answered; AssertionError if that takes too long."""
        deadline = time.monotonic() + seconds
        while self.statuses[200] < answers:
            assert time.monotonic() < deadline, f"only {dict(self.statuses)} in {seconds} s"
            time.sleep(0.05)


@contextmanager
def pressure(
    url: str,
    *,
    at_once: int = 4,
    max_tokens: int = 24,
    words: int = 120,
    models: Sequence[str] = ("",),
    keys: Sequence[str] = ("",),
) -> Iterator[Pressure]:
    """Ask ``url`` all the time, ``at_once`` requests in parallel; half of a prompt is common to all."""
    going = Pressure()

    def ask(number: int) -> None:
        rng = random.Random(number)
        while not going.stopped.is_set():
            common = " ".join(WORDS[i % len(WORDS)] for i in range(words // 2))
            own = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, words // 2)))
            body = {"prompt": f"{common} {own}", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
            model = rng.choice(list(models))
            going.statuses[
                _asked(url, body | ({"model": model} if model else {}), rng.choice(list(keys)))
            ] += 1

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(at_once)]
    for thread in threads:
        thread.start()
    try:
        yield going
    finally:
        going.stopped.set()
        for thread in threads:
            thread.join(30)


def _asked(url: str, body: Mapping[str, object], key: str) -> int:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        time.sleep(0.05)
        return error.code
    except OSError:
        time.sleep(0.05)
        return 0
