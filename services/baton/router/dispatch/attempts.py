"""The attempts to compute an answer: each begins on workers that can take it; after a failure the next
attempt continues from the tokens that were delivered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from baton.handoff.identity import sign_handle
from baton.handoff.messages import Name
from baton.router.dispatch.answers import Answer, Group
from baton.router.dispatch.placing import AttemptWorkers, Placing
from baton.router.dispatch.retries import Retries
from baton.router.dispatch.suspects import Suspects
from baton.router.dispatch.types import RingError
from baton.router.dispatch.waiting_room import FullError, WaitingRoom
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.unlinked import LinkRefusal
from baton.router.fleet.worker_client import WorkerClient
from baton.router.traces.record import Attempt
from baton.telemetry.resumes import Cause, Reason, ResumeMetrics
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SUSPECT_WAITS_S = 60.0
"""The longest time that a request waits until other suspects are cleared, in seconds."""


class Attempts:
    """The attempts under way, and the requests that wait for their next attempt."""

    def __init__(self, fleet: Fleet, retries: Retries, metrics: ResumeMetrics) -> None:
        self.groups: dict[str, Group] = {}
        """The groups that workers still compute as one request, by name."""
        self.searches: set[asyncio.Task[None]] = set()
        """The tasks that look for workers."""
        self.waiting = WaitingRoom(retries.policy.queue_size)
        self._suspects = Suspects()
        self._suspects_waiting = WaitingRoom(retries.policy.queue_size)
        """Suspects that wait until the one that runs is cleared."""
        self._fleet = fleet
        self.placing = Placing(fleet, self.groups)
        self._retries = retries
        self._metrics = metrics
        self._metrics.watch_waiting(self.waiting.__len__)

    # --- beginning an attempt

    def start(self, group: Group) -> None:
        """Begin the first attempt of a group."""
        self._retries.request_came()
        self._seek(group)

    def _seek(self, group: Group, pause: float = 0.0) -> None:
        """Begin an attempt: now, if a worker can take it and no other request waits, otherwise as soon as one
        can. ``pause``: seconds to wait before."""
        at_once = not (pause or group.retry_state.watched or len(self.waiting))
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
            if group.retry_state.watched and not await self._until_alone(group):
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
        """Wait until no other suspect runs. False: that took too long, and the group is given up on."""
        enter = partial(self._suspects.enter, group.retry_state)
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
        """Return the error of a request that no worker can take. ``before``: the error of its last attempt,
        if there was one. ``waited``: the seconds that the request waited."""
        missing = "prefill worker" if self._fleet.can_decode else "worker that can decode"
        message = f"no {missing} is ready" + (f", after {waited:g} s" if waited else "")
        refusals = self._fleet.unlinked() if before is None else []
        if refusals:
            message += f"; {len(refusals)} pairs cannot be linked, as {refusals[-1].reason}"
        if before is None:
            return RingError(503, "no_worker", message)
        return RingError(before.status, before.code, f"{before}; {message}")

    def _begin(self, group: Group) -> bool:
        """Begin an attempt, if it can be placed now; return whether it was. Raises RingError if a first
        attempt cannot be placed and the options say that it is not to wait; later attempts always wait."""
        placed = self.placing.choose(group)
        if placed is not None:
            self._submit(group, placed)
            return True
        mode = self._fleet.placement.no_prefill if self._fleet.can_decode else self._fleet.placement.no_decode
        if mode == "fail" and group.error is None:
            raise self._nobody(None)
        return False

    def _submit(self, group: Group, place: AttemptWorkers) -> None:
        """Start an attempt on workers that were found ready in the same turn of the event loop."""
        decode, prefill = group.decode, group.prefill = place.decode, place.prefill
        group.revision = decode.hello.revision if decode.hello else ""
        # Beam search names its answers by rank, so its workers need the names of all, even of closed ones.
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
            priority=group.priority.to_proto(time.monotonic()),
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
        """Count the attempt, and stamp its requests as placed."""
        self._metrics.placed("local" if group.prefill is None else "handoff")
        now = time.perf_counter()
        for answer in group.answers:
            answer.request.timings.placed = answer.request.timings.placed or now

    @staticmethod
    def _note_attempt(group: Group, place: AttemptWorkers) -> None:
        """Add the attempt to the trace of each answer that it computes."""
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
        # With several answers the worker that computes the prompt samples or replays each first token, which
        # does not count here.
        num_tokens = len(submit.prompt_ids) + (0 if submit.forks else len(submit.output_ids))
        name = Name(submit.request_id, submit.attempt)
        submit.decode.handoff_address = hello.handoff_address
        submit.decode.incarnation = hello.incarnation
        submit.decode.handle = sign_handle(decode.key, name, hello.incarnation, num_tokens)

    # --- during an attempt

    def part(self, group: Group) -> None:
        """Part the answers of a group: decode has sent tokens, so prefill's fate matters no more, and each
        answer is a request of its own from here on."""
        group.parted, group.prefill = True, None
        group.avoided.clear()
        self.groups.pop(group.name, None)
        for answer in group.answers:
            if answer.closed and not answer.entry.finished:
                self.cancel(group, [answer])

    def got_on(self, group: Group, worker: WorkerClient) -> None:
        """Note that tokens have come from ``worker``. A first token from prefill alone is no progress: each
        attempt begins with one."""
        if group.interrupted_at is not None:
            self._metrics.pause.observe(time.monotonic() - group.interrupted_at)
            group.interrupted_at = group.error = group.left = None
            group.refusals = 0
        if worker is group.decode:
            group.retry_state.in_vain = group.retry_state.unbegun = 0
        if group.retry_state.deaths and (group.retry_state.got_to(group.delivered) or not group.going):
            self._stop_search(group)

    # --- retrying

    def place_again(self, group: Group, refused_by: WorkerClient, reason: str) -> None:
        """Place a refused attempt, of which nothing was computed, on other workers, while there are any.

        Placement leaves out a worker that drains. For any other refusal the cause is the decode worker, which
        prefill cannot link to or which has no room: each refusal leaves one fewer to choose from.
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

    def link_refused(self, group: Group, refused_by: WorkerClient, refusal: LinkRefusal) -> None:
        """Place an attempt elsewhere whose two workers can never be linked. There is one such attempt for
        each pair of workers, and it draws on no budget."""
        prefill, decode = group.prefill, group.decode
        if prefill is None or decode is None or not self._fleet.never_link(prefill, decode, refusal):
            self.place_again(group, refused_by, refusal.reason)
            return
        [group] = self.withdraw(group, but=refused_by) or [group]
        if group.going:
            told = f"{refusal.reason} (this pair is not tried again)"
            log.warning("request %s: attempt %d ended: %s", group.name, group.attempt - 1, told)
            self.go_on(group, "refused", RingError(503, "worker_error", told))

    def handoff_broke(self, group: Group, told_by: WorkerClient, reason: str) -> None:
        """Start over after a broken handoff, whose KV is lost. The worker that did not tell of it is avoided:
        if either of the two is the cause, it is that one."""
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
        """End the attempt on all workers but one. Returns the groups to go on with: the group itself, or one
        for each answer that is not over if the answers have parted; none if all are over."""
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
            group.priority,
            [answer],
            group.retry_state.fork(),
            begun=True,
            attempt=group.attempt,
            revision=group.revision,
            name=answer.request.request_id,
            interrupted_at=group.interrupted_at,
            traced=group.traced,
        )
        return answer.group

    def resume(self, group: Group, cause: Cause, error: RingError) -> None:
        """Try again after an attempt that failed and is withdrawn, from the tokens that were delivered. The
        client is told ``error`` if the request has used up its attempts or the retry budget."""
        if cause == "refused":
            group.refusals += 1
            since = group.interrupted_at
            over = since is not None and time.monotonic() - since >= self._retries.policy.queue_timeout
            pause = self._retries.pause_after(group.refusals)
        else:
            group.retry_state.failed(computed=group.was_computed)
            over = self._retries.exhausted(group.retry_state)
            pause = self._retries.pause_after(group.retry_state.failures, settle=True)
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
        if cause != "refused":  # no worker had begun a refused attempt
            for answer in group.going:
                answer.request.timings.interruptions += 1
        self._seek(group, pause)

    def _give_up(self, group: Group, reason: Reason, error: RingError) -> None:
        self._metrics.gave_up(reason)
        log.warning("request %s is given up on (%s): %s", group.name, reason, error)
        self.end(group, error)

    def blame(self, present: Sequence[Group]) -> None:
        """Blame groups for the death of a worker that computed them, and give up on those that caused it."""
        retry_states = [(group.retry_state, group.delivered) for group in present]
        guilty = self._suspects.died(retry_states, time.monotonic())
        for group in present:
            group.fled = None
            if group.retry_state in guilty:
                message = (
                    f"{group.retry_state.deaths} workers died as they computed this request: "
                    "it is given up on"
                )
                self._give_up(group, "poison_request", RingError(500, "poison_request", message))
        self._suspects_waiting.changed()

    def _stop_search(self, group: Group) -> None:
        """Stop looking for workers for a group; if it ran as a suspect, the next suspect may run."""
        if group.search is not None and group.search is not asyncio.current_task():
            group.search.cancel()
        if self._suspects.leave(group.retry_state):
            self._suspects_waiting.changed()

    # --- ending answers

    def close(self, answer: Answer) -> None:
        """Close an answer that its client no longer reads, and cancel it on workers as soon as that cancels
        no other answer."""
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
        """End all answers of a group with ``error``, and cancel them on all workers but one, which knows."""
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
        """Cancel answers on all workers of the group but one. Before the answers part, all must be cancelled
        at once: by the group's name, and the others as forks, as decode may have parted them by now."""
        names = [answer.request.request_id for answer in answers]
        name = names[0] if group.parted else group.name
        forks = [other for other in names if other != name]
        for worker in group.workers:
            if worker is not but:
                worker.cancel(name, group.attempt, forks)
