"""A router before simulated workers: its knowledge of them comes late, as in the real one."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from baton.core.block_hash import short
from baton.router.fleet.unreported import UnreportedLoad
from baton.router.placement import Choice, PlacementOptions, WorkerReport
from baton.router.placement.placer import Placer
from baton.v1 import worker_pb2 as pb
from loadtest.placement.profile import Profile
from loadtest.placement.traces import Conversation, tokens
from loadtest.placement.workers import Clock, Job, Told, Worker, named


class Policy(Protocol):
    """A policy of placement: it is asked where a prompt goes."""

    def joined(self, worker: str, hello: pb.WorkerHello) -> None: ...

    def told(self, worker: str, events: pb.BlockEvents) -> bool: ...

    def choice(self, prompt: Sequence[int], reports: Sequence[WorkerReport]) -> tuple[Choice, int]:
        """Return the choice, and the prompt tokens that are expected to be computed there."""


class Shipped:
    """The router's own policy."""

    def __init__(self, options: PlacementOptions) -> None:
        self._placer = Placer(options)
        self.joined, self.told = self._placer.joined, self._placer.told

    def choice(self, prompt: Sequence[int], reports: Sequence[WorkerReport]) -> tuple[Choice, int]:
        decision = self._placer.place("", prompt, reports)
        assert decision is not None
        return decision.choice, len(prompt) - decision.chosen.cached


class LeastLoaded:
    """The policy before placement: the prefill worker with the fewest waiting tokens and the decode worker
    with the fewest sequences; among equals the worker that was given nothing for longest."""

    def joined(self, worker: str, hello: pb.WorkerHello) -> None: ...

    def told(self, worker: str, events: pb.BlockEvents) -> bool:
        return True

    def choice(self, prompt: Sequence[int], reports: Sequence[WorkerReport]) -> tuple[Choice, int]:
        decodes = [report for report in reports if report.role == "decode"]
        prefills = [report for report in reports if report.role == "prefill"]
        decode = min(decodes, key=lambda w: (w.sequences, w.prefill_tokens, w.last_given_s))
        prefill = min(prefills, key=lambda w: (w.prefill_tokens, w.sequences, w.last_given_s))
        return Choice(decode.address, prefill.address), len(prompt)


class Sticky(LeastLoaded):
    """Session affinity: a conversation goes back to the workers of its first turn, whatever their load. The
    first tokens identify it."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, ...], Choice] = {}

    def choice(self, prompt: Sequence[int], reports: Sequence[WorkerReport]) -> tuple[Choice, int]:
        session = tuple(prompt[:16])
        if session not in self._sessions:
            self._sessions[session], _ = super().choice(prompt, reports)
        return self._sessions[session], len(prompt)


@dataclass(slots=True)
class _Known:
    """The router's knowledge of one worker."""

    worker: Worker
    told: Told
    sent: UnreportedLoad = field(default_factory=UnreportedLoad)
    coming: int = 0
    last_given_s: float = 0.0
    next_event: int = 0
    report: WorkerReport | None = None


class Router:
    def __init__(self, clock: Clock, workers: Sequence[Worker], policy: Policy) -> None:
        self._clock, self._policy = clock, policy
        self._known = {worker.address: _Known(worker, worker.outbox.popleft()) for worker in workers}
        self._coming: Counter[str] = Counter()
        self.decision_s: list[float] = []
        for worker in workers:
            profile = worker.profile
            hello = pb.WorkerHello(block_size=profile.block_size, tells_blocks=True)
            policy.joined(worker.address, hello)
            policy.told(worker.address, pb.BlockEvents(restart=True))

    def place(self, job: Job) -> None:
        for known in self._known.values():
            self._hear(known)
        reports = [known.report or self._report(known) for known in self._known.values()]
        began = time.perf_counter()
        (decode, prefill), uncached = self._policy.choice(job.prompt, reports)
        self.decision_s.append(time.perf_counter() - began)
        first = self._known[prefill or decode]
        first.sent.add(uncached, 1)
        target = None
        for known in {first.worker.address: first, decode: self._known[decode]}.values():
            known.last_given_s = self._clock.now
            known.report = None
        if prefill is not None:
            target = self._known[decode].worker
            self._known[decode].coming += 1
        self._clock.after(first.worker.profile.message_s, lambda: first.worker.submit(job, target))

    def arrived(self, decode: Worker) -> None:
        """Note that decode has its first token of a request that was handed on."""
        known = self._known[decode.address]
        known.coming -= 1
        known.report = None

    def _hear(self, known: _Known) -> None:
        """Take every frame that has come by now."""
        known.worker.heartbeat()
        outbox = known.worker.outbox
        told = None
        while outbox and outbox[0].arrives_at <= self._clock.now:
            told = outbox.popleft()
        if told is None:
            return
        known.told, known.report = told, None
        known.sent.acknowledge(pb.Load(submits_taken=told.submits_taken))
        journal = known.worker.pool.journal
        changes = journal.since(known.next_event, told.journal_end - known.next_event)
        if changes is None:  # more changes than are kept: take all of it, as after a snapshot
            digests = known.worker.pool.digests()
            end = journal.end
            events = pb.BlockEvents(first=end, end=end, restart=True, stored=map(short, digests))
            known.next_event = end
        else:
            events = pb.BlockEvents(
                first=changes.first,
                end=changes.end,
                stored=map(short, changes.stored),
                removed=map(short, changes.removed),
            )
            known.next_event = changes.end
        self._policy.told(known.worker.address, events)

    def _report(self, known: _Known) -> WorkerReport:
        told, worker, profile = known.told, known.worker, known.worker.profile
        known.report = WorkerReport(
            address=worker.address,
            role="prefill" if worker.role == "prefill" else "decode",
            prefill_tokens=told.prefill_tokens + known.sent.tokens,
            sequences=told.sequences + known.sent.sequences + known.coming,
            last_given_s=known.last_given_s,
            max_running=profile.max_running,
            block_size=profile.block_size,
            blocks_held=told.held,
            blocks_spare=told.spare,
            prefill_tokens_per_s=told.tokens_per_s,
            step_base_s=told.base_s,
            step_row_s=told.row_s,
            chunk_tokens=profile.chunk_tokens,
            mixed_prefill_tokens=profile.mixed_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            link_bytes_per_s=profile.link_bytes_per_s,
        )
        return known.report


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run."""

    jobs: list[Job]
    decision_s: list[float]
    busy: dict[str, float]
    """The mean share of the time that a role's workers computed, by role."""


def simulate(
    trace: Sequence[Conversation],
    policy: Policy,
    profile: Profile,
    prefill: int = 8,
    decode: int = 16,
    *,
    seed: int = 0,
) -> Outcome:
    """Simulate all of a trace, to its end. ``seed``: the seed of the answers' tokens."""
    clock, draw = Clock(), random.Random(seed)
    workers = [Worker(clock, profile, "prefill", f"p{n}") for n in range(prefill)]
    workers += [Worker(clock, profile, "decode", f"d{n}") for n in range(decode)]
    router = Router(clock, workers, policy)
    jobs: list[Job] = []

    def ask(conversation: Conversation, turn: int, before: array[int]) -> None:
        asked = conversation.turns[turn]
        answer = tokens(draw, asked.outputs)
        prompt = before + asked.message
        job = Job(len(jobs), clock.now, prompt, answer, lambda: joined(), lambda: answered())
        jobs.append(named(job, profile.block_size))

        def joined() -> None:
            assert job.decode is not None
            clock.after(profile.message_s, partial(router.arrived, job.decode))

        def answered() -> None:
            if turn + 1 < len(conversation.turns):
                pause = conversation.turns[turn + 1].pause_s
                clock.after(pause, partial(ask, conversation, turn + 1, job.prompt + job.answer))

        router.place(job)

    for conversation in trace:
        clock.after(conversation.begins_s, partial(ask, conversation, 0, array("q")))
    clock.run()
    busy = {
        role: sum(w.busy_s for w in workers if w.role == role)
        / clock.now
        / sum(w.role == role for w in workers)
        for role in ("prefill", "decode")
    }
    return Outcome(jobs, router.decision_s, busy)
