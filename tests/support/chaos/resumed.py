"""How often the tokens of an answer that goes on elsewhere are not those of an undisturbed run.

In float32 never. In a type of fewer bits two tokens may be so nearly alike that the rounding decides, and it
rounds otherwise: a step that has other sequences beside this one adds in another order, and a prompt that is
computed again is computed in other pieces. So the same requests are asked in calm twice, by as many clients:
answers that differ between these two differ by the batch alone. Then workers are killed and drained, and what
is compared are the answers that had tokens before their attempt ended and got the rest from another attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import httpx

from tests.support.chaos.streams import (
    ENDED,
    PREFILL_OPTIONS,
    ROUTER_OPTIONS,
    Event,
    Plan,
    Question,
    Reply,
    Report,
    Streams,
    ask,
    asks,
    made,
    worker_options,
)
from tests.support.random_requests import Ask
from tests.support.ring import Ring, Service, running_ring, scrape
from tests.support.rings_at_their_limit import errors_logged

log = logging.getLogger(__name__)

KINDS: dict[Event | None, int] = {"drain decode": 1, "kill decode": 1, None: 10}
"""What ends attempts whose answers have tokens, and how often each is drawn. None: the worker is stopped
until the router has lost it, which needs no start of a process."""
STOP = "stop decode"
MOST_CHARACTERS = 1200
"""The budget of a request: the time to compute prompts again is the time of a run."""
GAP_S = (3.0, 5.0)
"""The time in which all decode workers serve between two events. A request that makes no progress between two
lost workers is suspected of killing them."""
SERVES_WITHIN_S = 180.0
REFUSED = "draining"
"""The figure of an attempt that ended before anything was computed."""
NOT_ASKED = frozenset({"n", "best_of", "use_beam_search", "prompt_logprobs", "echo"})
"""Fields of requests with several answers, or with none that streams."""


@dataclass
class Rates:
    """Answers that were compared with those of the first calm run, and those of other tokens."""

    dtype: str
    seed: int
    clients: int
    calm: int = 0
    calm_differ: int = 0
    resumed: int = 0
    resumed_differ: int = 0
    undisturbed: int = 0
    """Answers of the disturbed phase whose attempts all went well."""
    undisturbed_differ: int = 0
    tokens: int = 0
    """In the resumed answers."""
    events: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """The first of them, for a reader."""


def differs(reply: Reply, true: Reply) -> bool:
    """Whether an answer has other tokens, or ends otherwise."""
    ours, theirs = reply.choices[0], true.choices[0]
    return (ours.token_ids, ours.finish_reason) != (theirs.token_ids, theirs.finish_reason)


def single_streams(asked: Sequence[Ask]) -> list[Ask]:
    """Return the short requests of one answer, all of them streamed with the ids of their tokens."""
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return [
        replace(each, body=each.body | wanted)
        for each in asked
        if not NOT_ASKED & each.body.keys() and len(str(each.body)) < MOST_CHARACTERS
    ]


class ResumedStreams(Streams):
    """Calm runs, and load on a ring whose decode workers are killed and drained until enough was resumed."""

    def __init__(self, ring: Ring, rng: random.Random, clients: int, rates: Rates) -> None:
        super().__init__(ring, rng, clients, Report(rates.seed))
        self.rates = rates

    async def measure(self, asked: Sequence[Ask], wanted: int, max_s: float) -> None:
        began = time.monotonic()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._ring.url, timeout=None, limits=limits) as http:
            first, second = [await self._calm(http, asked) for _ in range(2)]
            interrupted = self._interrupted()  # where others take the machine, workers look silent
            pairs = [
                pair
                for pair in zip(first, second, strict=True)
                if not interrupted.keys() & {question.true.id for question in pair}
            ]
            self.rates.calm = len(pairs)
            self.rates.calm_differ = sum(differs(other.true, one.true) for one, other in pairs)
            first = [one for one, _ in pairs]
            clients = [asyncio.create_task(self._client(http, first)) for _ in range(self._clients)]
            try:
                while len(self.resumed()) < wanted and time.monotonic() - began < max_s:
                    await self._until_serving(len(self._ring.of_role("decode")))
                    await asyncio.sleep(self._rng.uniform(*GAP_S))
                    [kind] = self._rng.choices(list(KINDS), list(KINDS.values()))
                    victim = self._rng.choice(self._ring.of_role("decode"))
                    await (self._stop_worker(victim) if kind is None else self._do(kind, victim))
                    log.info("%s: %d answers were resumed so far", kind or STOP, len(self.resumed()))
            finally:
                self._stop.set()
                await asyncio.gather(*clients)
        await asyncio.to_thread(self._ring.wait_idle, 30.0)
        self._compare()
        self.rates.seconds = time.monotonic() - began

    async def _calm(self, http: httpx.AsyncClient, asked: Sequence[Ask]) -> list[Question]:
        room = asyncio.Semaphore(self._clients)

        async def one(question: Ask) -> Question:
            async with room:
                reply = await ask(http, question)
            if reply.failure is not None:
                raise ValueError(f"undisturbed: {reply.failure}: {question.body}")
            return Question(question, reply)

        return list(await asyncio.gather(*map(one, asked)))

    async def _until_serving(self, count: int) -> None:
        """Wait until the router has so many decode workers."""
        async with asyncio.timeout(SERVES_WITHIN_S):
            while True:
                samples = await asyncio.to_thread(scrape, f"{self._ring.url}/metrics")
                up = [
                    value for name, value in samples.items() if "worker_ready" in name and '"decode"' in name
                ]
                if sum(up) == count:
                    return
                await asyncio.sleep(0.1)

    async def _stop_worker(self, victim: Service) -> None:
        await asyncio.to_thread(victim.freeze)
        try:
            await self._until_serving(len(self._ring.of_role("decode")) - 1)
        finally:
            victim.thaw()
        self.report.events[STOP] += 1

    async def _client(self, http: httpx.AsyncClient, questions: Sequence[Question]) -> None:
        while not self._stop.is_set():
            question = self._rng.choice(questions)
            reply = await ask(http, question.ask)
            self._replies.append((question, reply))
            if reply.failure is not None:
                self.rates.violations.append(f"{reply.failure[:600]}\n    {reply.id}: {question.ask.body}")

    def _interrupted(self) -> dict[str, list[float]]:
        """Return when attempts of each answer ended that had begun, by the answer's request id."""
        found: dict[str, list[float]] = {}
        for when, name, why in ENDED.findall(self._ring.router.log.read_text()):
            if REFUSED not in why:
                at = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
                found.setdefault(name.rpartition("-")[0], []).append(at)
        return found

    def resumed(self) -> list[tuple[Question, Reply]]:
        """Return the complete answers that had tokens before an attempt ended and got more after it."""
        interrupted = self._interrupted()
        return [
            (question, reply)
            for question, reply in self._replies
            if reply.failure is None
            and any(
                reply.choices[0].arrivals[0] < at < reply.choices[0].arrivals[-1]
                for at in interrupted.get(reply.id, ())
                if reply.choices[0].arrivals
            )
        ]

    def _compare(self) -> None:
        rates, interrupted = self.rates, self._interrupted()
        for question, reply in self.resumed():
            rates.resumed += 1
            rates.tokens += reply.usage[1]
            if differs(reply, question.true):
                rates.resumed_differ += 1
                ours, theirs = reply.choices[0], question.true.choices[0]
                rates.differences.append(f"{reply.id}: {ours.text[-80:]!r} instead of {theirs.text[-80:]!r}")
        calm = [
            (question, reply)
            for question, reply in self._replies
            if reply.failure is None and reply.id not in interrupted
        ]
        rates.undisturbed = len(calm)
        rates.undisturbed_differ = sum(differs(reply, question.true) for question, reply in calm)
        rates.events = self.report.events
        rates.violations += self.report.violations


def measure(tmp: Path, plan: Plan, wanted: int) -> Rates:
    """Start a ring, with its logs in ``tmp``, and go on until ``wanted`` answers were resumed, or for
    ``plan.max_s`` seconds."""
    rng = random.Random(plan.seed)
    model = made(tmp, plan.model)
    asked = single_streams(asks(rng, plan.questions, plan.longest, model))
    rates = Rates(plan.dtype, plan.seed, plan.clients)
    with running_ring(
        tmp,
        model=model,
        prefill=1,
        decode=2,
        dtype=plan.dtype,
        options=worker_options(model),
        prefill_options=PREFILL_OPTIONS,
        router_options=ROUTER_OPTIONS,
    ) as ring:
        streams = ResumedStreams(ring, rng, plan.clients, rates)
        asyncio.run(streams.measure(asked, wanted, plan.max_s))
        rates.violations += errors_logged(ring)
    return rates
