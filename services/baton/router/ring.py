"""The ring of workers behind one router: placement, submission, and the tokens that come back."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from baton.connector.identity import sign_handle
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import Name
from baton.router.answers import Answer, Group
from baton.router.compatibility import by_group, unpaired
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.discovery.static import StaticDiscovery
from baton.router.ledger import failure
from baton.router.members import Members
from baton.router.placement import PlacementOptions, may_prefill, takes_over
from baton.router.placer import Placer
from baton.router.retries import Retries, RetryPolicy
from baton.router.traces.record import Attempt, Placed
from baton.router.trail import Suspects
from baton.router.types import ModelInfo, Request, RingError, TokenChunk, deadline_exceeded
from baton.router.waiting import FullError, WaitingRoom
from baton.router.workers import WorkerClient
from baton.telemetry.resumes import Cause, Reason, ResumeMetrics
from baton.telemetry.ring import WorkerView
from baton.tls.channels import Dialer
from baton.urgency import CALM, Urgency
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

WORKER_TELLS_S = 0.5
"""How long after a deadline the worker's own word on it may take: it looks every tick, and its clock began
when the request had reached it."""
SUSPECT_WAITS_S = 60.0
"""The longest that a request waits until other suspects are cleared."""
FLED_S = 3.0
"""A handoff may be heard to break before the stream of the worker whose death broke it."""
MOVES_AT_ONCE = 8
"""Answers that are on their way from one decode worker that drains; its others are written on meanwhile."""
WORTH_MOVING = 16
"""Tokens that an answer has left at least, for its move to take less time than its rest."""


class Place(NamedTuple):
    """Where an attempt goes."""

    decode: WorkerClient
    prefill: WorkerClient | None
    uncached: int
    """Tokens that are expected to be computed there."""
    placed: Placed
    """Why, for the record."""


class WorkerRing:
    """``baton.router.types.Ring`` over gRPC streams to the workers that discovery knows."""

    def __init__(
        self,
        discovery: Discovery | Sequence[str],
        model_name: str,
        cluster_key: bytes,
        tempo: Tempo = TEMPO,
        retries: Retries | None = None,
        metrics: ResumeMetrics | None = None,
        placement: PlacementOptions | None = None,
        max_staleness_s: float = math.inf,
        dialer: Dialer | None = None,
    ) -> None:
        """``discovery``: how the workers are known, or their addresses. The ring is not ready when that was
        not confirmed for longer than ``max_staleness_s``. ``retries``, ``metrics`` and ``placement``: None
        for the default policy, for metrics that nobody reads, and for the default options. ``dialer``: None
        for plain connections."""
        self._model_name = model_name
        self._last_view: ModelInfo | None = None
        """Of the workers, when one was last ready."""
        self._peers_changed = False
        """Since those who prefill were told of the decode workers."""
        self._retries = retries or Retries(RetryPolicy())
        self._metrics = metrics or ResumeMetrics(CollectorRegistry())
        self._waiting = WaitingRoom(self._retries.policy.queue_size)
        self._metrics.watch_waiting(self._waiting.__len__)
        self._suspects = Suspects()
        self._watch = WaitingRoom(self._retries.policy.queue_size)
        """Suspects that wait until another one is cleared."""
        self._cluster_key = cluster_key
        self._placement = placement or PlacementOptions()
        self._placer = Placer(self._placement)
        self._max_staleness_s = max_staleness_s
        self._at: dict[str, WorkerClient] = {}
        """Whose word on blocks counts, by address: a new process may have that of one which is gone."""
        self._answers: dict[str, Answer] = {}
        """Those under way, by request id."""
        self._groups: dict[str, Group] = {}
        """Those whose attempt is under way as one, by name."""
        self._searches: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.discovery = StaticDiscovery(discovery) if isinstance(discovery, Sequence) else discovery
        router_id = secrets.token_hex(8)
        self.members = Members(
            lambda address: WorkerClient(address, router_id, self, tempo, self.members, dialer)
        )
        self.members.set(self.discovery.known)

    @property
    def workers(self) -> list[WorkerClient]:
        """All that are known, and those that still finish what they have."""
        return self.members.workers

    def start(self) -> None:
        """Dial the workers, and dial again for as long as the router lives; likewise those that come."""
        self.members.start()
        self._tasks = [
            asyncio.create_task(self._run_timers(), name="timers"),
            asyncio.create_task(self.discovery.run(self._on_known), name="discovery"),
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self._searches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.members.close()

    def _on_known(self, endpoints: Sequence[Endpoint]) -> None:
        self.members.set(endpoints)
        self._peers_changed = True
        self._waiting.changed()

    async def _run_timers(self) -> None:
        """Listen for silence, and empty the workers that drain, for as long as the router lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                self._tick(now - before)
            except Exception:  # without heartbeats every worker would take the router for lost
                log.exception("a tick failed")
            before = now

    def _tick(self, elapsed: float) -> None:
        self.members.tick(elapsed)
        if self._peers_changed:
            self._peers_changed = False
            self._name_peers()
        for worker in self.workers:
            if worker.ready and worker.draining:
                self._move_from(worker)
        self._placer.tick()
        self._waiting.changed()  # nobody says when an ejection ends

    @property
    def model(self) -> ModelInfo | None:
        """The most cautious view of the ready workers: a request must fit wherever it is placed. While none
        is ready, as it was before."""
        return self._last_view

    def _view(self) -> ModelInfo | None:
        hellos = [w.hello for w in self.workers if w.hello is not None]
        if not hellos:
            return None
        return ModelInfo(
            name=self._model_name,
            revision=hellos[0].revision,
            max_model_len=min(h.max_model_len for h in hellos),
            vocab_size=min(h.vocab_size for h in hellos),
            eos_token_ids=frozenset().union(*(h.eos_token_ids for h in hellos)),
            takes_priorities=all(h.takes_priorities for h in hellos),
        )

    @property
    def ready(self) -> bool:
        return self._can_decode and not self.stale

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return not self._answers

    @property
    def _can_decode(self) -> bool:
        return any(worker.usable and worker.role != "prefill" for worker in self.workers)

    @property
    def stale(self) -> bool:
        return self.discovery.staleness_s > self._max_staleness_s

    def loads(self) -> list[WorkerView]:
        """Every worker, with its last report. Of two at one address, the one that is known."""
        by_address = {worker.address: worker for worker in reversed(self.workers)}
        return [
            WorkerView(
                address=worker.address,
                role=worker.role if worker.ready else "unknown",
                ready=worker.ready,
                draining=worker.draining,
                running=worker.load.running,
                waiting=worker.load.waiting,
                blocks_free=worker.load.blocks_free,
                blocks_cached=worker.load.blocks_cached,
                blocks_held=worker.load.blocks_held,
                open_handoffs=worker.load.open_handoffs,
                ejected=self.members.ejected(worker),
            )
            for worker in by_address.values()
        ]

    def _place(self, group: Group, avoided: Collection[str] = ()) -> Place | None:
        """Who answers next, of those that are ready and not ``avoided``."""
        coming: Counter[WorkerClient] = Counter()
        for other in self._groups.values():
            if other.decode is not None and other.prefill is not None:
                coming[other.decode] += len(other.going)
        available = self.members.available(time.monotonic())
        by_address = {w.address: w for w in available if w.address not in avoided}
        for worker in by_address.values():
            worker.expect(coming[worker])
        first = group.going[0]
        token_ids, delivered = group.prompt_ids, first.entry.output_ids
        shares = first.request.params.prompt_logprobs is None or bool(delivered)
        decision = self._placer.place(
            first.request.request_id,
            token_ids + delivered if delivered else token_ids,
            [worker.report() for worker in by_address.values()],
            shares=shares,
            salt=first.request.cache_salt,
        )
        if decision is None:
            return None
        decode, prefill = decision.choice
        uncached = decision.prompt.num_tokens - decision.chosen.cached
        placed = Placed.of(decision, lambda address: by_address[address].report())
        return Place(by_address[decode], by_address[prefill] if prefill else None, uncached, placed)

    @contextmanager
    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], urgency: Urgency = CALM
    ) -> Iterator[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt, several times; see ``Ring.generate``."""
        group = Group(prompt_ids, urgency)
        group.answers = [Answer(request, group) for request in requests]
        try:
            yield [self._chunks(answer) for answer in group.answers]
        finally:
            answers = tuple(group.answers)
            for answer in answers:
                self._close(answer)
            for answer in answers:
                answer.group.answers.clear()  # a cycle: it would stay until somebody looks for cycles

    async def _chunks(self, answer: Answer) -> AsyncGenerator[TokenChunk]:
        if not answer.group.begun:
            self._start(answer.group)
        wait = answer.arrived.get if answer.group.urgency.deadline is None else partial(self._next, answer)
        try:
            finished = False
            while not finished:
                arrived = await wait()
                if isinstance(arrived, RingError):
                    raise arrived
                finished = arrived.finish_reason is not None
                yield arrived
        finally:
            self._close(answer)

    async def _next(self, answer: Answer) -> TokenChunk | RingError:
        """What comes next. If the deadline has passed and no worker says so, all answers end here."""
        deadline = answer.group.urgency.deadline
        assert deadline is not None
        try:
            async with asyncio.timeout(deadline - time.monotonic() + WORKER_TELLS_S):
                return await answer.arrived.get()
        except TimeoutError:
            self._end(answer.group, deadline_exceeded())
            return await answer.arrived.get()

    def _start(self, group: Group) -> None:
        if group.urgency.overdue(time.monotonic()):
            raise deadline_exceeded()
        group.begun = True
        self._retries.request_came()
        self._answers |= {answer.request.request_id: answer for answer in group.answers}
        self._seek(group)

    # --- attempts

    def _seek(self, group: Group, pause: float = 0.0) -> None:
        """Begin an attempt: now, if there is somebody to take it and nobody waits, otherwise when there
        is."""
        at_once = not (pause or group.trail.watched or len(self._waiting))
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
            self._searches.add(group.search)
            group.search.add_done_callback(self._searches.discard)

    async def _search(self, group: Group, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
            if group.trail.watched:
                enter = partial(self._suspects.enter, group.trail)
                await self._watch.wait(enter, time.monotonic() + SUSPECT_WAITS_S, group.turn)
            until = time.monotonic() + self._retries.policy.queue_timeout
            await self._waiting.wait(partial(self._begin, group), until, group.turn)
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

    def _not_placed(self, group: Group) -> None:
        self._end(group, RingError(500, "internal_error", "the router could not place this request"))

    def _nobody(self, before: RingError | None, waited: float = 0.0) -> RingError:
        """``before``: how the attempt before ended, if there was one. ``waited``: for how many seconds."""
        missing = "prefill worker" if self._can_decode else "worker that can decode"
        message = f"no {missing} is ready" + (f", after {waited:g} s" if waited else "")
        if before is None:
            return RingError(503, "no_worker", message)
        return RingError(before.status, before.code, f"{before}; {message}")

    def _begin(self, group: Group) -> bool:
        """Begin an attempt, if it can be placed now. Raises RingError if it is not to wait either, as it may
        be told of a first one; what was begun waits."""
        placed = self._choose(group)
        if placed is not None:
            self._submit(group, placed)
            return True
        mode = self._placement.no_prefill if self._can_decode else self._placement.no_decode
        if mode == "fail" and group.error is None:
            raise self._nobody(None)
        return False

    def _choose(self, group: Group) -> Place | None:
        """An attempt that was refused or broke avoids those with which it did, as long as there are others of
        their role; an answer that was begun is written on by the same revision of the model, as long as there
        is one."""
        begun = any(answer.entry.output_ids for answer in group.going)
        foreign = {
            w.address for w in self.workers if begun and w.hello and w.hello.revision != group.revision
        }
        placed = self._place(group, group.avoided | foreign)
        for_want = self._placement.disaggregation == "always"  # of another prefill worker, not by choice
        if group.avoided and (
            placed is None or (for_want and placed.prefill is None and takes_over(placed.decode.role))
        ):
            placed = self._place(group, foreign)
        return self._place(group) if placed is None and foreign else placed

    def _withdraw(self, group: Group, but: WorkerClient | None = None) -> list[Group]:
        """End the attempt on all workers but one. Returns what is to go on: the group, or when its answers
        have parted each that goes on, as a group of its own."""
        self._cancel(group, group.answers, but=but)
        self._groups.pop(group.name, None)
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

    def _resume(self, group: Group, cause: Cause, error: RingError) -> None:
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
        self._go_on(group, cause, error, pause)

    def _go_on(self, group: Group, cause: Cause, error: RingError, pause: float = 0.0) -> None:
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
        self._end(group, error)

    def _stop_search(self, group: Group) -> None:
        """No workers are sought for it any more, and as a suspect it makes way for others."""
        if group.search is not None and group.search is not asyncio.current_task():
            group.search.cancel()
        if self._suspects.leave(group.trail):
            self._watch.changed()

    # --- the end

    def _close(self, answer: Answer) -> None:
        """Nobody wants more of this answer. Workers hear of it, as soon as it is no others' affair too."""
        if answer.closed:
            return
        answer.closed = True
        group = answer.group
        self._answers.pop(answer.request.request_id, None)
        if group.parted:
            if not answer.entry.finished:
                self._cancel(group, [answer])
        elif not group.going:
            if not all(each.entry.finished for each in group.answers):
                self._cancel(group, group.answers)
            self._groups.pop(group.name, None)
        if not group.going:
            self._stop_search(group)

    @staticmethod
    def _cancel(group: Group, answers: Sequence[Answer], but: WorkerClient | None = None) -> None:
        """End answers on all workers of the group but one. While these work for all answers at once, only all
        can be ended: the name of the group goes first, and the others may have parted by now."""
        names = [answer.request.request_id for answer in answers]
        name = names[0] if group.parted else group.name
        forks = [other for other in names if other != name]
        for worker in group.workers:
            if worker is not but:
                worker.cancel(name, group.attempt, forks)

    def _submit(self, group: Group, place: Place) -> None:
        """Start an attempt on workers that were ready a moment ago, in the same turn of the event loop."""
        decode, prefill = group.decode, group.prefill = place.decode, place.prefill
        group.revision = decode.hello.revision if decode.hello else ""
        # Whose search it is decides by rank which answer has which name: there all are told, or none.
        first, *others = group.answers if group.is_search else group.going
        group.name = first.request.request_id
        self._groups[group.name] = group
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

    def _place_again(self, group: Group, refused_by: WorkerClient, reason: str) -> None:
        """Nothing of the attempt was begun: the next one goes to other workers, while there are any.

        A worker that drains is left out anyway. Otherwise it is the decode worker that prefill cannot link
        to, or that has no room: one fewer to choose from with each refusal.
        """
        decode = group.decode
        [group] = self._withdraw(group, but=refused_by) or [group]
        if not group.going:
            return
        error = RingError(503, "worker_error", reason)
        if refused_by.draining:
            self._go_on(group, "refused", error)
            return
        if decode is not None:
            group.avoided.add(decode.address)
        self._resume(group, "refused", error)

    def _handoff_broke(self, group: Group, told_by: WorkerClient, reason: str) -> None:
        """What was computed is lost. If one of the workers is why, it is the other."""
        others = [worker for worker in group.workers if worker is not told_by]
        computing = set(group.computing)
        [group] = self._withdraw(group, but=told_by) or [group]
        if not group.going:
            return
        for other in others:
            group.avoided.add(other.address)
            group.fled = (other, time.monotonic()) if other in computing else None
        self._resume(group, "handoff", RingError(503, "worker_error", reason))

    def _end(self, group: Group, error: RingError, but: WorkerClient | None = None) -> None:
        """All answers end with ``error``, on all workers but one, which knows."""
        if group.search is not None:
            group.search.cancel()
        if group.traced is not None:
            group.traced.end(time.perf_counter(), f"{error.code}: {error}")
        self._cancel(group, group.answers, but=but)
        self._groups.pop(group.name, None)
        self._fail(group.going, error)
        self._stop_search(group)

    @staticmethod
    def _fail(answers: Sequence[Answer], error: RingError) -> None:
        for answer in answers:
            answer.entry.finished = True
            answer.arrived.put(error)

    # --- what workers say (``baton.router.workers.Watcher``)

    def busy(self, worker: WorkerClient) -> bool:
        return any(worker in answer.group.workers for answer in self._answers.values())

    def on_ready(self, worker: WorkerClient) -> None:
        assert worker.hello is not None
        self._at[worker.address] = worker
        self._placer.joined(worker.address, worker.hello)

    def on_change(self, worker: WorkerClient) -> None:
        self._note_workers()
        self._waiting.changed()
        if worker.draining:
            self._move_from(worker)
        for lonely in unpaired(self.workers):
            log.warning("prefill worker %s fits no decode worker: it gets no requests", lonely.address)

    def _note_workers(self) -> None:
        """One has become ready, drains, or is lost."""
        self._last_view = self._view() or self._last_view
        self._peers_changed = True

    def _name_peers(self) -> None:
        """Those who prefill link to the decode workers before the first request needs it. Once for all
        changes between two ticks: where hundreds of workers come at once, each is told of hundreds."""
        for like in by_group(self.workers).values():
            peers = pb.DecodePeers(
                peers=(
                    pb.DecodePeer(handoff_address=w.hello.handoff_address, incarnation=w.hello.incarnation)
                    for w in like
                    if w.hello is not None and takes_over(w.role) and w.usable
                )
            )
            for worker in like:
                if may_prefill(worker.role):
                    worker.name_peers(peers)

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None:
        for delta in frame.deltas:  # for every token: as little as may be
            if delta.started:
                self._take_start(worker, delta)
                continue
            if _failed(delta):
                group = self._groups.get(delta.request_id)
                if group is not None and delta.attempt == group.attempt:
                    self._take_failure(group, worker, delta)
                    continue
            answer = self._answers.get(delta.request_id)
            if answer is not None:
                self._take(answer, worker, delta)
        for phases in frame.phases:
            self._take_phases(phases)

    def _take_phases(self, phases: pb.Phases) -> None:
        group = self._group_of(phases.request_id)
        if group is not None and group.attempt == phases.attempt and group.traced is not None:
            group.traced.tell(phases, time.perf_counter())

    def _group_of(self, request_id: str) -> Group | None:
        answer = self._answers.get(request_id)
        return self._groups.get(request_id) or (answer.group if answer else None)

    def _take_start(self, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        group = self._group_of(delta.request_id)
        if group is not None and group.attempt == delta.attempt:
            self._note_begun(group)
            group.computing.add(worker)
            if group.traced is not None and group.traced.started is None:
                group.traced.started = time.perf_counter()

    @staticmethod
    def _note_begun(group: Group) -> None:
        now = time.perf_counter()
        for answer in group.answers:
            answer.request.passage.begun = answer.request.passage.begun or now

    def _take_failure(self, group: Group, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        """An attempt has failed that is under way as one, be the answer over that gave it its name."""
        if delta.refused:
            self._place_again(group, worker, delta.error)
        elif delta.lost:
            self._handoff_broke(group, worker, delta.error)
        else:
            self._end(group, failure(delta), but=worker)

    def _take(self, answer: Answer, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        group = answer.group
        passes = not group.parted and worker is group.decode
        if passes and delta.attempt == group.attempt and not _failed(delta):
            self._part(group)
        accepted = answer.entry.accept(delta)
        if accepted is None:
            return
        answer.arrived.put(accepted)
        if not isinstance(accepted, RingError):
            self._got_on(group, worker)
            return
        knows = worker if _failed(delta) else None  # not of a gap, which is found here
        if group.parted:
            self._cancel(group, [answer], but=knows)
        else:
            self._end(group, accepted, but=knows)

    def _got_on(self, group: Group, worker: WorkerClient) -> None:
        """Tokens have come. Prefill's first one alone is no way to get on: each attempt has that."""
        if group.interrupted_at is not None:
            self._metrics.pause.observe(time.monotonic() - group.interrupted_at)
            group.interrupted_at = group.error = group.left = None
            group.refusals = 0
        if worker is group.decode:
            group.trail.in_vain = group.trail.unbegun = 0
        if group.trail.deaths and (group.trail.got_to(group.delivered) or not group.going):
            self._stop_search(group)

    def _part(self, group: Group) -> None:
        """The baton has been passed: prefill's fate matters no more, and each answer goes its own way."""
        group.parted, group.prefill = True, None
        group.avoided.clear()
        self._groups.pop(group.name, None)
        for answer in group.answers:
            if answer.closed and not answer.entry.finished:
                self._cancel(group, [answer])

    def on_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        return self._at.get(worker.address) is not worker or self._placer.told(worker.address, events)

    def on_lost(self, worker: WorkerClient) -> None:
        if self._at.get(worker.address) is worker:
            del self._at[worker.address]
            self._placer.left(worker.address)
        self._note_workers()
        groups = {id(answer.group): answer.group for answer in self._answers.values()}.values()
        if worker.drained:  # what it had to hand on is with decode
            for group in groups:
                if worker is group.prefill:
                    group.prefill = None
        broken = [group for group in groups if worker in group.workers and group.going]
        if broken or not worker.drained:
            count = sum(len(group.going) for group in broken)
            log.warning("worker %s is lost, and %d attempts with it", worker.address, count)
        roles = {id(group): "decode" if worker is group.decode else "prefill" for group in broken}
        computed = {answer for group in broken if worker in group.computing for answer in group.going}
        lost = [(part, roles[id(group)]) for group in broken for part in self._withdraw(group, but=worker)]
        fled = [group for group in groups if group not in broken and self._fled_from(group, worker)]
        if not worker.draining:
            self._blame([*(part for part, _ in lost if computed.intersection(part.answers)), *fled])
        for part, role in sorted(lost, key=lambda each: each[0].turn):
            if not part.going:
                continue
            message = f"the {role} worker answering this request was lost, in attempt {part.attempt}"
            error = RingError(503, "worker_lost", message)
            if worker.draining:  # its time was over, and it had said so: no failure of the request
                log.warning("request %s: attempt %d ended: %s", part.name, part.attempt - 1, error)
                self._go_on(part, "drain", error)
            else:
                self._resume(part, "worker_lost", error)

    @staticmethod
    def _fled_from(group: Group, worker: WorkerClient) -> bool:
        if group.fled is None or not group.going:
            return False
        other, since = group.fled
        return other is worker and time.monotonic() - since < FLED_S

    def _blame(self, present: Sequence[Group]) -> None:
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
        self._watch.changed()

    def _move_from(self, worker: WorkerClient) -> None:
        """Have the answers of a decode worker that drains written on by others, a few at a time. What is
        still being handed on to it comes later; with nobody else of its revision to decode, or while requests
        wait for those there are, they stay where they are."""
        assert worker.hello is not None
        revision = worker.hello.revision
        decoders = [
            other
            for other in self.workers
            if other is not worker and other.usable and other.role != "prefill"
            if other.hello is not None and other.hello.revision == revision
        ]
        if worker.role == "prefill" or not decoders or len(self._waiting):
            return
        groups = list({id(answer.group): answer.group for answer in self._answers.values()}.values())
        moving = sum(group.left is worker for group in groups)
        for group in groups:
            if moving >= MOVES_AT_ONCE:
                return
            if group.decode is worker and self._is_movable(group):
                if self._choose(group) is None:  # where answers need prefill workers, and there are none
                    return
                for part in self._withdraw(group):
                    part.left = worker
                    log.info("request %s: attempt %d ended: its worker drains", part.name, part.attempt - 1)
                    self._go_on(part, "drain", RingError(503, "worker_lost", "its worker drains"))
                    moving += 1

    @staticmethod
    def _is_movable(group: Group) -> bool:
        if group.is_search or not (group.parted or group.prefill is None):
            return False
        left = (a.request.params.max_tokens - len(a.entry.output_ids) for a in group.going)
        return max(left, default=0) >= WORTH_MOVING


def _failed(delta: pb.TokenDelta) -> bool:
    return delta.finish_reason == inference_pb2.FINISH_REASON_ERROR
