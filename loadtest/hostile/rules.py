"""The harm that one tenant's sampling parameters do to others' steps, on a real worker."""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
import string
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path

from baton.process import ready
from loadtest.hostile.ring import TreeService
from loadtest.hostile.vocabulary import Found, Trial

ANSWERS, TOKENS = 48, 130
ROUNDS = 2
REPEATED, BIAS = "Q", {"52": 100}
"""A character, and what makes its token of the demo model the likeliest."""
WORDS = [REPEATED * (101 + at % 27) + string.ascii_letters[at // 27] for at in range(500)]
"""Bad words that share all but their ends. Answers come to the longest of them."""
DEEP = 0.6
"""The last part of an answer, in which it ends with the beginnings of all words."""
PATIENCE_S = 240.0


class Honest:
    """A client that streams, and notes when its tokens come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.arrivals: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        document = {"prompt": "once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        while not self._over.is_set():
            with _posted(self._url, document) as stream:
                for line in stream:
                    if line.startswith(b"data: {"):
                        self.arrivals.append(time.monotonic())
                    if self._over.is_set():
                        return

    def gap(self, begin: float, end: float) -> float:
        """Return the median time between two tokens, in seconds."""
        inside = [at for at in self.arrivals if begin <= at <= end]
        return statistics.median(later - at for at, later in itertools.pairwise(inside))


def _posted(url: str, document: Mapping[str, object]) -> HTTPResponse:
    body = json.dumps({"model": "demo", **document}).encode()
    sent = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    answer: HTTPResponse = urllib.request.urlopen(sent, timeout=PATIENCE_S)
    return answer


def _await_worker(url: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"no worker was ready within {PATIENCE_S:g} s")
        time.sleep(0.1)


def _answered(url: str, words: list[str]) -> tuple[float, float]:
    """Have one request answered. Return the times between which it was deep in the bad words."""
    document = {
        "prompt": "a",
        "n": ANSWERS,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logit_bias": BIAS,
        "bad_words": words,
    }
    began = time.monotonic()
    _posted(url, document).read()
    ended = time.monotonic()
    return began + (1 - DEEP) * (ended - began), ended


def bad_words(tree: Path, tmp: Path) -> Found:
    """Ask for many answers, with bad words and without in turns, beside an honest stream."""
    found, key = Found(), secrets.token_hex(32)
    with ExitStack() as stack:
        argv: tuple[str, ...] = ("both", "--model", "demo", "--port", "0", "--threads", "1")
        argv = (*argv, "--dtype", "float32")
        worker = TreeService("both", argv, tmp / "both.log", tree=tree, cluster_key=key)
        stack.callback(worker.stop)
        worker.start()
        worker.wait_ready()
        assert isinstance(worker.ready, ready.WorkerReady)
        argv = ("router", "--model", "demo", "--port", "0", "--worker", worker.ready.address)
        router = TreeService("router", argv, tmp / "router.log", tree=tree, cluster_key=key)
        stack.callback(router.stop)
        router.start()
        router.wait_ready()
        assert isinstance(router.ready, ready.RouterReady)
        url = f"http://{router.ready.http}"
        _await_worker(url)
        honest = Honest(url)
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS):
            for hostile in (False, True):
                spans = _answered(url, WORDS if hostile else [])
                gaps[hostile].append(honest.gap(*spans))
                found.count("hostile" if hostile else "calm")
        honest.end()
    calm, hostile_s = statistics.median(gaps[False]), statistics.median(gaps[True])
    found.figures |= {"honest_itl_calm_s": calm, "honest_itl_s": hostile_s, "step_ratio": hostile_s / calm}
    return found


TRIALS = (
    Trial(
        name="bad-words",
        finding="bad words",
        aim="a step of others takes twice as long",
        run=bad_words,
        reached=lambda found: found.figure("step_ratio") > 2,
    ),
)
