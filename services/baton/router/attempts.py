"""The attempts to compute an answer: each begins on workers that can take it, and when it has failed, another
one goes on from the tokens that were delivered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from baton.connector.identity import sign_handle
from baton.connector.messages import Name
from baton.router.answers import Answer, Group
from baton.router.fleet import Fleet, Place
from baton.router.retries import Retries
from baton.router.traces.record import Attempt
from baton.router.trail import Suspects
from baton.router.types import RingError
from baton.router.waiting import FullError, WaitingRoom
from baton.router.workers import WorkerClient
from baton.telemetry.resumes import Cause, Reason, ResumeMetrics
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SUSPECT_WAITS_S = 60.0
"""The longest that a request waits until other suspects are cleared."""


class Attempts:
    """Those under way, and those that wait to begin."""

    def __init__(self, fleet: Fleet, cluster_key: bytes, retries: Retries, metrics: ResumeMetrics) -> None:
        self.groups: dict[str, Group] = {}
        """Those whose attempt is under way as one, by name."""
        self.searches: set[asyncio.Task[None]] = set()
        """For workers."""
        self.waiting = WaitingRoom(retries.policy.queue_size)
        self._suspects = Suspects()
        self._suspects_waiting = WaitingRoom(retries.policy.queue_size)
        """Until another one is cleared."""
        self._fleet = fleet
        self._cluster_key = cluster_key
        self._retries = retries
        self._metrics = metrics
        self._metrics.watch_waiting(self.waiting.__len__)

    # --- the beginning

    def start(self, group: Group) -> None:
        """Begin the first attempt."""
        self._retries.request_came()
        self._seek(group)

    def _seek(self, group: Group, pause: float = 0.0) -> None:
        """Begin an attempt: now, if there is somebody to take it and nobody waits, otherwise when there
        is."""
        at_once = not (pause or group.trail.watched or len(self.waiting))
        try:
            begun = at_once and self._begin(group)
        except RingError as error:
            self._give_up(group, "no_worker", error)
            return
        except Exception:  # a client waits for this
            log.exception("request %s: no attempt could be begun", group.name)
            self._not_placed(group)
            return
        if not begun:
            group.search = asyncio.create_task(self._search(group, pause))
            self.searches.add(group.search)
            group.search.add_done_callback(self.searches.discard)

    async def _search(self, group: Group, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            if group.trail.watched and not await self._until_alone(group):
                return
            until = time.monotonic() + self._retries.policy.queue_timeout
            await self.waiting.wait(partial(self._begin, group), until, group.turn)
        except TimeoutError:
            waited = self._retries.policy.queue_timeout
            self._give_up(group, "no_worker", self._nobody(group.error, waited))
        except RingError as error:
            self._give_up(group, "no_worker", error)
        except FullError:
            message = "too many requests wait for a worker already"
            self._give_up(group, "queue_full", RingError(503, "no_worker", message))
        except Exception:  # a client waits for this
            log.exception("request %s: no attempt could be begun", group.name)
            self._not_placed(group)
        finally:
            if group.search is asyncio.current_task():
                group.search = None

    async def _until_alone(self, group: Group) -> bool:
        """Wait until no others run that may be why workers died. False: that took too long."""
        enter = partial(self._suspects.enter, group.trail)
        try:
            await self._suspects_waiting.wait(enter, time.monotonic() + SUSPECT_WAITS_S, group.turn)
        except TimeoutError:
            message = f"its workers died, and others whose did were before it for {SUSPECT_WAITS_S:g} s"
            self._give_up(group, "worker_lost", RingError(503, "worker_lost", message))
            return False
        return True

    def _not_placed(self, group: Group) -> None:
        self.end(group, RingError(500, "internal_error", "the router could not place this request"))

    def _nobody(self, before: RingError | None, waited: float = 0.0) -> RingError:
        """``before``: how the attempt before ended, if there was one. ``waited``: for how many seconds."""
        missing = "prefill worker" if self._fleet.can_decode else "worker that can decode"
        message = f"no {missing} is ready" + (f", after {waited:g} s" if waited else "")
        if before is None:
            return RingError(503, "no_worker", message)
        return RingError(before.status, before.code, f"{before}; {message}")

    def _begin(self, group: Group) -> bool:
        """Begin an attempt, if it can be placed now. Raises RingError if it is not to wait either, as it may
        be told of a first one; what was begun waits."""
        placed = self.choose(group)
        if placed is not None:
            self._submit(group, placed)
            return True
        mode = self._fleet.placement.no_prefill if self._fleet.can_decode else self._fleet.placement.no_decode
        if mode == "fail" and group.error is None:
            raise self._nobody(None)
        return False

    def choose(self, group: Group) -> Place | None:
        """Who would take an attempt now."""
        coming: Counter[WorkerClient] = Counter()
        for other in self.groups.values():
            if other.decode is not None and other.prefill is not None:
                coming[other.decode] += len(other.going)
        return self._fleet.choose(group, coming)

    def _submit(self, group: Group, place: Place) -> None:
        """Start an attempt on workers that were ready a moment ago, in the same turn of the event loop."""
        decode, prefill = group.decode, group.prefill = place.decode, place.prefill
        group.revision = decode.hello.revision if decode.hello else ""
        # Whose search it is decides by rank which answer has which name: there all are told, or none.
        first, *others = group.answers if group.is_search else group.going
        group.name = first.request.request_id
        self.groups[group.name] = group
        self._metrics.attempts.inc()
        self._note_attempt(group, place)
        submit = pb.Submit(
            request_id=group.name,
            attempt=group.attempt,
            prompt_ids=group.prompt_ids,
            output_ids=first.entry.output_ids,
            params=first.request.params.to_proto(),
            urgency=group.urgency.to_proto(time.monotonic()),
            cache_salt=first.request.cache_salt,
            forks=[
                pb.Fork(
                    request_id=answer.request.request_id,
                    seed=answer.request.params.seed,
                    output_ids=answer.entry.output_ids,
                )
                for answer in others
            ],
        )
        self._note_placed(group)
        if prefill is None:
            decode.submit(submit, place.uncached)
            return
        self._aim(submit, decode)
        decode.touch()
        prefill.submit(submit, place.uncached)

    def _note_placed(self, group: Group) -> None:
        """Its workers are about to be told."""
        self._metrics.placed("local" if group.prefill is None else "handoff")
        now = time.perf_counter()
        for answer in group.answers:
            answer.request.passage.placed = answer.request.passage.placed or now

    @staticmethod
    def _note_attempt(group: Group, place: Place) -> None:
        """In the traces of all answers that it is for."""
        traced = group.traced = Attempt(
            group.attempt,
            time.perf_counter(),
            place.decode.address,
            place.prefill.address if place.prefill else None,
            place.placed,
        )
        for answer in group.going:
            if answer.request.trace is not None:
                answer.request.trace.begun(traced)

    def _aim(self, submit: pb.Submit, decode: WorkerClient) -> None:
        """Name the decode worker that the request is to be handed on to."""
        hello = decode.hello
        assert hello is not None
        # Of an answer with siblings the first token is drawn anew, or given back, by who computes the prompt.
        num_tokens = len(submit.prompt_ids) + (0 if submit.forks else len(submit.output_ids))
        name = Name(submit.request_id, submit.attempt)
        submit.decode.handoff_address = hello.handoff_address
        submit.decode.incarnation = hello.incarnation
        submit.decode.handle = sign_handle(self._cluster_key, name, hello.incarnation, num_tokens)

    # --- while it is under way

    def part(self, group: Group) -> None:
        """The baton has been passed: prefill's fate matters no more, and each answer goes its own way."""
        group.parted, group.prefill = True, None
        group.avoided.clear()
        self.groups.pop(group.name, None)
        for answer in group.answers:
            if answer.closed and not answer.entry.finished:
                self.cancel(group, [answer])

    def got_on(self, group: Group, worker: WorkerClient) -> None:
        """Tokens have come. Prefill's first one alone is no way to get on: each attempt has that."""
        if group.interrupted_at is not None:
            self._metrics.pause.observe(time.monotonic() - group.interrupted_at)
            group.interrupted_at = group.error = group.left = None
            group.refusals = 0
        if worker is group.decode:
            group.trail.in_vain = group.trail.unbegun = 0
        if group.trail.deaths and (group.trail.got_to(group.delivered) or not group.going):
            self._stop_search(group)

    # --- another one

    def place_again(self, group: Group, refused_by: WorkerClient, reason: str) -> None:
        """Nothing of the attempt was begun: the next one goes to other workers, while there are any.

        A worker that drains is left out anyway. Otherwise it is the decode worker that prefill cannot link
        to, or that has no room: one fewer to choose from with each refusal.
        """
        decode = group.decode
        [group] = self.withdraw(group, but=refused_by) or [group]
        if not group.going:
            return
        error = RingError(503, "worker_error", reason)
        if refused_by.draining:
            self.go_on(group, "refused", error)
            return
        if decode is not None:
            group.avoided.add(decode.address)
        self.resume(group, "refused", error)

    def handoff_broke(self, group: Group, told_by: WorkerClient, reason: str) -> None:
        """What was computed is lost. If one of the workers is why, it is the other."""
        others = [worker for worker in group.workers if worker is not told_by]
        computing = set(group.computing)
        [group] = self.withdraw(group, but=told_by) or [group]
        if not group.going:
            return
        for other in others:
            group.avoided.add(other.address)
            group.fled = (other, time.monotonic()) if other in computing else None
        self.resume(group, "handoff", RingError(503, "worker_error", reason))

    def withdraw(self, group: Group, but: WorkerClient | None = None) -> list[Group]:
        """End the attempt on all workers but one. Returns what is to go on: the group, or when its answers
        have parted each that goes on, as a group of its own."""
        self.cancel(group, group.answers, but=but)
        self.groups.pop(group.name, None)
        self._stop_search(group)
        parts = [group] if group.going else []
        if group.traced is not None:
            group.traced.end(time.perf_counter())
        if group.parted and len(group.answers) > 1:
            parts = [self._part_of(group, answer) for answer in group.going]
        computed = bool(group.computing)
        for part in parts:
            part.attempt += 1
            part.prefill = part.decode = None
            part.was_computed = computed
            part.computing.clear()
            part.parted = False
            for answer in part.answers:
                answer.entry.attempt = part.attempt
        return parts

    def _part_of(self, group: Group, answer: Answer) -> Group:
        answer.group = Group(
            group.prompt_ids,
            group.urgency,
            [answer],
            group.trail.fork(),
            begun=True,
            attempt=group.attempt,
            revision=group.revision,
            name=answer.request.request_id,
            interrupted_at=group.interrupted_at,
            traced=group.traced,
        )
        return answer.group

    def resume(self, group: Group, cause: Cause, error: RingError) -> None:
        """An attempt has failed, and is withdrawn: another one goes on from the tokens that were delivered,
        if it may, and soon. If not, the client is told ``error``."""
        if cause == "refused":
            group.refusals += 1
            since = group.interrupted_at
            over = since is not None and time.monotonic() - since >= self._retries.policy.queue_timeout
            pause = self._retries.pause_after(group.refusals)
        else:
            group.trail.failed(computed=group.was_computed)
            over = self._retries.exhausted(group.trail)
            pause = self._retries.pause_after(group.trail.failures, settle=True)
        if over:
            self._give_up(group, "worker_lost" if cause == "worker_lost" else "worker_error", error)
            return
        if pause is None:
            self._give_up(group, "retry_budget", error)
            return
        log.warning("request %s: attempt %d ended: %s", group.name, group.attempt - 1, error)
        self.go_on(group, cause, error, pause)

    def go_on(self, group: Group, cause: Cause, error: RingError, pause: float = 0.0) -> None:
        self._metrics.resumed(cause)
        group.error = error
        if group.traced is not None:
            group.traced.end(time.perf_counter(), f"{cause}: {error}")
        if group.interrupted_at is None:
            group.interrupted_at = time.monotonic()
        if cause != "refused":  # of that nothing was begun
            for answer in group.going:
                answer.request.passage.interruptions += 1
        self._seek(group, pause)

    def _give_up(self, group: Group, reason: Reason, error: RingError) -> None:
        self._metrics.gave_up(reason)
        log.warning("request %s is given up on (%s): %s", group.name, reason, error)
        self.end(group, error)

    def blame(self, present: Sequence[Group]) -> None:
        """A worker has died that was computing these. Who is found to be why is given up on."""
        trails = [(group.trail, group.delivered) for group in present]
        guilty = self._suspects.died(trails, time.monotonic())
        for group in present:
            group.fled = None
            if group.trail in guilty:
                message = (
                    f"{group.trail.deaths} workers died as they computed this request: it is given up on"
                )
                self._give_up(group, "poison_request", RingError(500, "poison_request", message))
        self._suspects_waiting.changed()

    def _stop_search(self, group: Group) -> None:
        """No workers are sought for it any more, and as a suspect it makes way for others."""
        if group.search is not None and group.search is not asyncio.current_task():
            group.search.cancel()
        if self._suspects.leave(group.trail):
            self._suspects_waiting.changed()

    # --- the end

    def close(self, answer: Answer) -> None:
        """Nobody wants more of this answer. Workers hear of it, as soon as it is no others' affair too."""
        group = answer.group
        if group.parted:
            if not answer.entry.finished:
                self.cancel(group, [answer])
        elif not group.going:
            if not all(each.entry.finished for each in group.answers):
                self.cancel(group, group.answers)
            self.groups.pop(group.name, None)
        if not group.going:
            self._stop_search(group)

    def end(self, group: Group, error: RingError, but: WorkerClient | None = None) -> None:
        """All answers end with ``error``, on all workers but one, which knows."""
        if group.search is not None:
            group.search.cancel()
        if group.traced is not None:
            group.traced.end(time.perf_counter(), f"{error.code}: {error}")
        self.cancel(group, group.answers, but=but)
        self.groups.pop(group.name, None)
        self._fail(group.going, error)
        self._stop_search(group)

    @staticmethod
    def _fail(answers: Sequence[Answer], error: RingError) -> None:
        for answer in answers:
            answer.entry.finished = True
            answer.arrived.put(error)

    @staticmethod
    def cancel(group: Group, answers: Sequence[Answer], but: WorkerClient | None = None) -> None:
        """End answers on all workers of the group but one. While these work for all answers at once, only all
        can be ended: the name of the group goes first, and the others may have parted by now."""
        names = [answer.request.request_id for answer in answers]
        name = names[0] if group.parted else group.name
        forks = [other for other in names if other != name]
        for worker in group.workers:
            if worker is not but:
                worker.cancel(name, group.attempt, forks)
