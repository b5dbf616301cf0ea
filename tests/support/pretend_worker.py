"""Workers to a router's ring that are no processes: what they say, and when it is heard, is up to the test.

A token follows from the prompt, the seed and all tokens before it, so that an answer which went on from other
tokens than were delivered ends otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.role import Role
from baton.router.dispatch.retries import RetryPolicy
from baton.router.placement import WorkerReport
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

LENGTH = 20
"""Tokens of every answer."""
AT_ONCE = RetryPolicy(
    max_attempts=10**9,
    queue_timeout=10.0**6,
    settle=0.0,
    first_pause=0.0,
    max_pause=0.0,
    budget_most=1e9,
)


def token_after(prompt: Sequence[int], seed: int, outputs: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr((list(prompt), seed, list(outputs))).encode(), digest_size=2)
    return int.from_bytes(digest.digest())


def true_answer(prompt: Sequence[int], seed: int) -> list[int]:
    outputs: list[int] = []
    while len(outputs) < LENGTH:
        outputs.append(token_after(prompt, seed, outputs))
    return outputs


@dataclass
class Job:
    """An attempt as a worker has it; its answers by name, each with its seed and all outputs."""

    submit: pb.Submit
    answers: dict[str, tuple[int, list[int]]]
    to_repeat: set[str] = field(default_factory=set)
    """Answers whose first token decode has still to repeat."""

    @classmethod
    def of(cls, submit: pb.Submit) -> Job:
        forks = {fork.request_id: (fork.seed, list(fork.output_ids)) for fork in submit.forks}
        first = {submit.request_id: (submit.params.seed, list(submit.output_ids))}
        return cls(submit, first | forks)

    def next_token(self, name: str) -> int:
        seed, outputs = self.answers[name]
        outputs.append(token_after(self.submit.prompt_ids, seed, outputs))
        return outputs[-1]


class PretendWorker:
    """As much of a ``WorkerClient`` as a ring uses, and of the worker behind it."""

    def __init__(self, number: int, role: Role, delivered: Callable[[str], list[int]]) -> None:
        """``delivered``: what the router has of an answer, by name."""
        self._delivered = delivered
        self.address = f"{role}-{number}"
        self.role = role
        self.hello: pb.WorkerHello | None = None
        self.key = b"key"
        self.load = pb.Load()
        self.drained = False
        self.refused = False
        self.incarnation = 0
        self.jobs: dict[tuple[str, int], Job] = {}
        """By the name of the attempt, or of a fork that goes its own way."""
        self.wire: list[pb.TokenDelta] = []
        """Said, and not heard yet."""
        self.given = 0
        self.unlinked = frozenset[str]()

    @property
    def ready(self) -> bool:
        return self.hello is not None

    @property
    def draining(self) -> bool:
        return self.load.draining

    @property
    def usable(self) -> bool:
        return self.ready and not self.draining

    def start(self) -> None:
        self.incarnation += 1
        role = pb.Role.Value(f"ROLE_{self.role.upper()}")
        self.hello = pb.WorkerHello(
            incarnation=f"{self.address}.{self.incarnation}",
            role=role,
            handoff_address=self.address,
            max_model_len=1000,
        )
        self.load, self.drained = pb.Load(), False

    def end(self) -> None:
        self.jobs.clear()
        self.wire.clear()
        self.hello = None

    def report(self) -> WorkerReport:
        return WorkerReport(
            self.address,
            self.role,
            0,
            len(self.jobs),
            float(self.given),
            self.usable,
            unlinked=self.unlinked,
        )

    def note_unlinked(self, prefills: frozenset[str]) -> None:
        self.unlinked = prefills

    def tick(self, elapsed: float) -> None: ...

    def name_peers(self, peers: pb.DecodePeers) -> None: ...

    def touch(self) -> None:
        self.given += 1

    def expect(self, sequences: int) -> None: ...

    def submit(self, submit: pb.Submit, uncached: int | None = None) -> None:
        self.given += 1
        answers: list[pb.Submit | pb.Fork] = [submit, *submit.forks]
        for answer in answers:
            assert list(answer.output_ids) == self._delivered(answer.request_id)
            assert len(answer.output_ids) <= 1 or not submit.forks
        if self.draining:
            self.fail(submit.request_id, submit.attempt, refused=True)
        else:
            self.jobs[submit.request_id, submit.attempt] = Job.of(submit)

    def cancel(self, request_id: str, attempt: int, fork_ids: Sequence[str] = ()) -> None:
        for name in (request_id, *fork_ids):
            for known in [key for key in self.jobs if key[0] == name and key[1] <= attempt]:
                del self.jobs[known]

    def fail(self, name: str, attempt: int, *, refused: bool = False, link_field: str = "") -> None:
        delta = pb.TokenDelta(
            request_id=name,
            attempt=attempt,
            error="pretended",
            refused=refused,
            lost=not refused,
            link_field=link_field,
        )
        delta.finish_reason = inference_pb2.FINISH_REASON_ERROR
        self.wire.append(delta)

    def begin(self, name: str, attempt: int) -> None:
        """It is about to be computed."""
        self.wire.append(pb.TokenDelta(request_id=name, attempt=attempt, started=True))

    def say(self, name: str, attempt: int, first_seq: int, token: int) -> None:
        reason = (
            inference_pb2.FINISH_REASON_LENGTH
            if first_seq == LENGTH - 1
            else inference_pb2.FINISH_REASON_UNSPECIFIED
        )
        self.wire.append(
            pb.TokenDelta(
                request_id=name, attempt=attempt, first_seq=first_seq, token_ids=[token], finish_reason=reason
            )
        )


class PretendMembers:
    """As much of ``Members`` as a ring uses."""

    def __init__(self, workers: Sequence[PretendWorker]) -> None:
        self.workers = list(workers)

    def available(self, now: float) -> list[PretendWorker]:
        return [worker for worker in self.workers if worker.usable]

    def ejected(self, worker: PretendWorker) -> bool:
        return False

    def tick(self, elapsed: float) -> None: ...

    async def close(self) -> None: ...
