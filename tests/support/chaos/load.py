"""Clients that ask one question after the other and check every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.support.chaos.catalogue import Question
from tests.support.chaos.client import ChaosClient, Reply
from tests.support.chaos.findings import Findings

Moment = Literal["submitted", "first token", "token"]
MOMENTS: tuple[Moment, ...] = ("submitted", "first token", "token")
PAUSE_AFTER_FAILURE_S = 0.05


@dataclass
class Tally:
    """What became of the requests."""

    completed: int = 0
    tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By the error's name."""
    reasons: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


class Load:
    """``clients`` closed loops over ``questions``, streamed or not."""

    def __init__(
        self,
        client: ChaosClient,
        questions: Sequence[Question],
        rng: random.Random,
        clients: int,
        findings: Findings,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._questions = questions
        self._rng = rng
        self._clients = clients
        self._findings = findings
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[Moment, list[asyncio.Future[None]]] = {moment: [] for moment in MOMENTS}

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._loop()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Let every request under way come to its end, whichever it is."""
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    async def moment(self, moment: Moment, timeout_s: float) -> None:
        """Wait until some request gets there, for as long as ``timeout_s``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[moment].append(future)
        await asyncio.wait([future], timeout=timeout_s)

    async def once(self) -> list[Reply]:
        """Every question, all at once."""
        return list(await asyncio.gather(*(self._ask(q, stream=False) for q in self._questions)))

    async def _loop(self) -> None:
        own = asyncio.current_task()
        while own in self._tasks:
            question = self._rng.choice(self._questions)
            reply = await self._ask(question, stream=self._rng.random() < 0.7)
            if reply.failure is not None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _ask(self, question: Question, *, stream: bool) -> Reply:
        seen = 0

        def on_tokens(reply: Reply) -> bool:
            nonlocal seen
            if len(reply.token_ids) > seen:
                self._pass("token" if seen else "first token")
            seen = len(reply.token_ids)
            return True

        began = time.monotonic()
        reply = await self._client.ask(
            question, stream=stream, on_sent=lambda: self._pass("submitted"), on_tokens=on_tokens
        )
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
        if reply.failure is None:
            self.tally.completed += 1
            self.tally.tokens += len(reply.token_ids)
        else:
            self.tally.failed[reply.code or "unnamed"] += 1
            self.tally.reasons[reply.failure] += 1
        self._findings.check(question, reply)
        return reply

    def _pass(self, moment: Moment) -> None:
        waiting, self._waiting[moment] = self._waiting[moment], []
        for future in waiting:
            if not future.done():
                future.set_result(None)
