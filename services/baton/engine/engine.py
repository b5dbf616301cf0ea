"""The engine: schedule → forward → sample → publish, one step at a time."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.salts import tenant_of
from baton.core.sampling_params import ResolvedSampling
from baton.engine.beam_group import AnswerToken, BeamGroup
from baton.engine.checks import RequestChecks
from baton.engine.execution import Launcher, PendingStep, Runner, Sampled, StepResult
from baton.engine.kv.arriving import Arriving
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_tier import HostTier, HostTierStats
from baton.engine.kv.prefix_journal import PrefixChanges
from baton.engine.needs import SequenceNeeds, compiled
from baton.engine.pace import StepSpeeds
from baton.engine.sampling.bad_words import BadWords
from baton.engine.sampling.bad_words_builder import BadWordsBuilder
from baton.engine.sampling.beams import Candidates
from baton.engine.scheduler import ScheduledBatch, Scheduler
from baton.engine.sequence import FinishReason, Sequence, SequenceStatus
from baton.engine.stats import EngineStats, WorkDone
from baton.engine.stop import finish_reason, stop_ids, stops
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.table import Grammar, TokenTable
from baton.parallel.ranks import ONE_NODE, Nodes
from baton.process.start_clock import StartClock
from baton.speculation.stats import NO_DRAFTS
from baton.text.tokenizer import Tokenizer
from baton_kernels.kv_layout import KVLayout

if TYPE_CHECKING:
    from baton.engine.config import EngineConfig
    from baton.engine.kv.host_memory import HostMemory
    from baton.engine.sampling.logits import LogitRules
    from baton.engine.start_progress import StartProgress
    from baton.engine.warm_up import LateBuilds
    from baton.speculation.speculator import Speculator

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """The start and end of a run, in seconds on this process's monotonic clock."""

    began: float
    ended: float


class _WholeStep:
    """A step of a runner without a launcher: all of it is computed when its result is asked for."""

    def __init__(self, runner: Runner, batch: ScheduledBatch) -> None:
        self._runner = runner
        self._batch = batch

    def choose(self) -> None: ...

    def result(self) -> StepResult:
        return self._runner.run(self._batch)


class _StepUnderWay(NamedTuple):
    """A step that was launched."""

    batch: ScheduledBatch
    pending: PendingStep
    began: float
    """The time of the launch, on the monotonic clock, in seconds."""


class SequenceOutput(NamedTuple):
    """The result of a step for one sequence."""

    seq: Sequence
    new_tokens: tuple[int, ...]
    """Tokens that are already in ``seq.output_ids``; several if drafts were accepted, none while the prompt
    is being computed."""
    finish_reason: FinishReason | None
    advanced_to: int
    """``num_computed`` after the step: the KV of this many tokens is in the blocks. Less than before if the
    sequence was preempted in between, and the blocks are other ones then."""
    forward: Span
    """The time of the step's forward pass."""
    details: TokenDetails | None = None
    """Log-probabilities of the new tokens, if the request asked for any."""
    error: str | None = None
    """The reason of ``FinishReason.ERROR``, in a line for the client."""
    blameless: bool = False
    """Whether an error is not the request's fault."""

    @property
    def first_new(self) -> int:
        """The place of the first of ``new_tokens`` among all tokens of the sequence."""
        return self.advanced_to + 1 - len(self.new_tokens)

    @property
    def is_first(self) -> bool:
        """Whether ``new_tokens`` begin the answer, or the part of it that is generated here, if the prompt
        was computed here."""
        return self.first_new == self.seq.num_prompt + self.seq.resumed_from


class Engine:
    """Runs sequences on one model. One thread calls :meth:`step`; any thread may call the rest.

    ``lock`` guards the scheduler and the pool. A step takes it to schedule and again to apply the results,
    and never during the forward pass, so that other threads can bind, pin and free blocks meanwhile.
    Sequences in a running pass keep their blocks until it is over, even if they are cancelled: its kernels
    may still write there.

    Where the runner has a ``launcher``, the next step is scheduled and launched before the tokens of this one
    are here: their ids stay on the device. An end that only the token tells is so seen one step late, and the
    surplus token is dropped. Sequences whose next token does more than join them wait a step
    (``Scheduler.schedule``).
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        host: HostMemory | None = None,
        grammars: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """``host`` holds the bytes of the scheduler's host tier. ``grammars`` None: no structured output.
        ``speculator`` None: no drafts."""
        self.lock = threading.RLock()
        self.work = threading.Event()
        """An event that is set whenever there may be new work to step."""
        self.runner = runner
        self.scheduler = scheduler
        self.host = host
        # Ids beyond the vocabulary, which some configurations name, are never sampled.
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self.vocab_size = vocab_size
        self._checks = RequestChecks(vocab_size, self.eos_token_ids)
        self.generated_tokens = 0
        self._work = WorkDone()
        self._pace = StepSpeeds()
        self.grammars = grammars
        self.speculator = speculator
        self.on_start: Callable[[list[Sequence]], None] = lambda _: None
        """Hears of sequences that are about to be computed for the first time, on the thread that steps and
        before the forward pass: if that ends the process, one of these sequences may be the cause."""
        self.late_builds: LateBuilds | None = None
        """The kernels compiled since the device was ready; None: none can be."""
        runner.keeps_hidden = speculator is not None and speculator.drafter.wants_hidden
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[Sequence, Callable[[Sequence], None]] = {}
        """Sequences that wait for what they need, each with the function that admits it then. They may hold
        blocks."""
        self._bad_words = BadWordsBuilder()
        self._untold: list[SequenceOutput] = []
        """Outputs to return with the next step."""
        self._groups: dict[Sequence, BeamGroup] = {}
        """Beam searches under way, by their first beam, which has the name of the request."""
        self._under_way: _StepUnderWay | None = None
        """The step that was launched ahead, while :meth:`step` does not run."""
        self._ended_at = 0.0
        """The end of the last step, on the monotonic clock, in seconds."""
        self.stalled = False
        """Whether the last call of :meth:`step` found nothing that it could compute."""

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: StartProgress | None = None,
        clock: StartClock | None = None,
        nodes: Nodes = ONE_NODE,
    ) -> Engine:
        """Loads the model, sizes the KV pool and runs the first requests, on all ranks on ``nodes``.
        ValueError if config and model do not agree or do not fit on the device, RankError if a rank cannot
        start, StartError if the first requests fail; ``progress`` hears of weights read and of steps
        recorded, ``clock`` of the phases."""
        # Imported here, since a process that simulates its steps has no torch.
        from baton.engine.first_requests import run_first_requests
        from baton.engine.kv.host_memory import HostMemory
        from baton.engine.startup import build_runner
        from baton.engine.warm_up import late_builds

        clock = clock or StartClock()
        built = build_runner(config, progress, clock, nodes)
        limits = config.limits(built.model_config.max_model_len, built.model_config.longest_shared_prompt)
        tier = host = None
        if built.num_host_blocks:
            break_even = BreakEven(config.sizes.block_size)
            tier = HostTier(built.num_host_blocks, break_even)
            with clock.phase("host_tier"):
                host = HostMemory(
                    built.runner.pool,
                    built.num_host_blocks,
                    break_even,
                    built.runner.ranks,
                    built.block_bytes,
                )
        held = "" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        pool = BlockPool(built.num_blocks, config.sizes.block_size, tier.save if tier else None, held)
        scheduler = Scheduler(limits, pool, tier, built.layout)
        eos = frozenset(built.model_config.eos_token_ids)
        vocab_size = built.model_config.vocab_size

        def tokens() -> TokenTable:
            return TokenTable.of(Tokenizer.from_dir(config.model), vocab_size, sorted(eos))

        speculator = built.speculator
        engine = cls(built.runner, scheduler, eos, vocab_size, host, GrammarCompiler(tokens), speculator)
        try:
            with clock.phase("warm_up"):
                run_first_requests(engine._trial(), built.runner)
                if host is not None:
                    host.try_out()
        except BaseException:
            engine.close()
            raise
        engine.late_builds = late_builds(built.runner.device)
        return engine

    def _trial(self) -> Engine:
        """An engine without figures and cached prefixes, over this one's runner and drafter. It is to be done
        before this one takes a step."""
        own = self.scheduler
        pool = BlockPool(own.pool.num_blocks, own.pool.block_size, kv_dtype=own.pool.kv_dtype)
        scheduler = Scheduler(own.limits, pool, layout=own.layout)
        speculator = self.speculator and self.speculator.anew()
        return Engine(self.runner, scheduler, self.eos_token_ids, self.vocab_size, speculator=speculator)

    def call_on_rank_death(self, on_death: Callable[[str], None]) -> None:
        """Calls ``on_death`` with which of the other ranks died and how, at once and on a thread of its own;
        no other caller hears of the death until it has returned."""
        if self.runner.ranks is not None:
            self.runner.ranks.call_on_death(on_death)

    def close(self) -> None:
        """Ends the processes of the other ranks, if there are any. No step may run, then or later."""
        if self.runner.ranks is not None:
            self.runner.ranks.close()

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def layout(self) -> KVLayout:
        """The groups of the model's layers, and their pages."""
        return self.scheduler.layout

    @property
    def pool(self) -> BlockPool:
        """The owners of the blocks. Use it under ``lock``."""
        return self.scheduler.pool

    def set_mixed_prefill_tokens(self, prefill_tokens: int | None) -> None:
        """Sets ``SchedulerLimits.mixed_prefill_tokens`` from the next step on."""
        with self.lock:
            limits = self.scheduler.limits
            self.scheduler.limits = replace(limits, mixed_prefill_tokens=prefill_tokens)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, which replaces an older attempt of the same request.

        ValueError if it could never run here, if a token id is out of range, or if this attempt or a newer
        one of the request is here already.
        """
        needs = self._prepare(seq)
        with self.lock:
            self._check_attempt(seq)
            self._enter(seq, needs, self.scheduler.add)
            self._replace_attempt(seq)
        self._await(seq, needs)

    def check(self, seq: Sequence) -> None:
        """Raises the ValueError that :meth:`add` would raise for a sequence that could never run here. Starts
        compiling its grammar, so that it may be ready when the sequence is added."""
        self._checks.check(seq)
        self.scheduler.check(seq)
        grammar = self._grammar_of(seq)
        if grammar is not None and grammar.done():
            compiled(grammar)

    def admit_computed(self, seq: Sequence, like: Sequence | None = None) -> None:
        """Joins a sequence that arrived by handoff: its ``block_ids`` hold the KV of all its tokens but the
        last, which is an output. Takes over one reference on each block, and enters full blocks into the
        prefix index. ``like`` is another answer to the same prompt that joined before, if there is one.
        ValueError as for :meth:`add`, or if blocks and tokens do not match: then the blocks remain the
        caller's.
        """
        needs = self._prepare(seq, like)
        with self.lock:
            self._check_attempt(seq)
            self._enter(seq, needs, self.scheduler.admit_computed)
            self._replace_attempt(seq)
        self._await(seq, needs)

    def admit_forked(self, answers: list[Sequence], arrived: Arriving) -> dict[Sequence, str]:
        """Joins the answers of one request that arrived by handoff, as :meth:`admit_computed` does, and takes
        over one reference on each of the pages, which they share. Answers that ended with their first token
        are left out. Returns the reason for each sequence that could not join."""
        refused: dict[Sequence, str] = {}
        joined: Sequence | None = None
        with self.lock:
            for seq in answers:
                if stops(seq, self.eos_token_ids):
                    continue
                self.pool.ref(arrived.pages)
                seq.arrive(arrived)
                try:
                    self.admit_computed(seq, joined)
                    joined = seq
                except ValueError as error:
                    self._discard(seq, None)
                    refused[seq] = str(error)
            self.pool.free(arrived.pages)
        return refused

    def cancel(self, request_id: str, attempt: int) -> bool:
        """Ends the request if it is here with this attempt or an older one; True if that ended something.

        Nothing is returned for it by steps that have not returned yet, except one that is just returning.
        Its blocks are freed now, or when the running forward pass is over.
        """
        with self.lock:
            seq = self._sequences.get(request_id)
            if seq is None or seq.attempt > attempt:
                return False
            del self._sequences[request_id]
            self._end(seq)
        self.work.set()
        return True

    def overdue(self, now: float) -> list[Sequence]:
        """Requests here, in whatever state, whose deadline has passed."""
        with self.lock:
            return [seq for seq in self._sequences.values() if seq.priority.overdue(now)]

    def has_any_of(self, owner: str) -> bool:
        """Whether a request of this owner is here."""
        with self.lock:
            return any(seq.owner == owner for seq in self._sequences.values())

    @property
    def open_requests(self) -> int:
        """Requests here, in whatever state."""
        return len(self._sequences)

    def count_of(self, owner: str) -> int:
        """Requests of this owner here, in whatever state."""
        with self.lock:
            return sum(seq.owner == owner for seq in self._sequences.values())

    def owner_of(self, request_id: str) -> str | None:
        """The owner of a request that is here, in whatever state."""
        seq = self._sequences.get(request_id)
        return None if seq is None else seq.owner

    def cancel_all_of(self, owner: str) -> None:
        """Ends every request of an owner that is gone."""
        with self.lock:
            for seq in [seq for seq in self._sequences.values() if seq.owner == owner]:
                self.cancel(seq.request_id, seq.attempt)

    def release(self, seq: Sequence) -> bool:
        """Forgets a held sequence and frees its blocks; False if it is not held (any more)."""
        with self.lock:
            if seq.status is not SequenceStatus.HELD:
                return False
            self._finish(seq, None)
            return True

    # -- handoffs that are to arrive ---------------------------------------------------------------------

    def reserve(self, num_tokens: int, turn: float = 0.0) -> bool:
        """Promises room for the KV of ``num_tokens`` tokens to a handoff with this ``turn``; False if the
        sequences here need it or a sequence waits whose turn is not later."""
        with self.lock:
            return self.scheduler.reserve(self.scheduler.counts.computed(num_tokens), turn)

    def bind_arriving(self, seq: Sequence) -> Arriving | None:
        """See ``Scheduler.bind_arriving``. Makes the copies that are due first: nothing may be received into
        blocks before they are made."""
        with self.lock:
            arriving = self.scheduler.bind_arriving(seq)
            self.copy_blocks()
            return arriving

    def free_pages(self, pages: Collection[int]) -> None:
        """Drops a reference of each of these pages."""
        with self.lock:
            self.pool.free(array("q", pages))

    def copy_blocks(self) -> None:
        """Makes the copies between pool and host tier that are due; on CUDA it starts them (``HostMemory``).
        A caller that allocates from the pool, or matches a prefix, calls this before it releases the
        lock."""
        with self.lock:
            if self.host is not None and self.scheduler.tier is not None:
                self.host.carry_out(self.scheduler.tier.take_plan())

    def unreserve(self, num_tokens: int) -> None:
        """Takes a promise of :meth:`reserve` back: the handoff is over, or is about to bind its blocks."""
        with self.lock:
            pages = self.scheduler.counts.computed(num_tokens)
            if pages > self.scheduler.reserved_blocks:
                reserved = self.scheduler.reserved_blocks
                raise ValueError(f"unreserve({num_tokens}) is {pages} pages, with {reserved} reserved")
            self.scheduler.reserved_blocks -= pages

    # -- the account of the prefix cache -----------------------------------------------------------------

    @property
    def prefix_end(self) -> int:
        """Number of the next event of the prefix cache."""
        return self.pool.journal.end

    def prefix_changes(self, number: int, most: int) -> PrefixChanges | None:
        """The changes since event ``number``; see ``PrefixJournal.since``."""
        with self.lock:
            return self.pool.journal.since(number, most)

    def prefix_snapshot(self) -> tuple[list[bytes], int]:
        """The digests in the prefix cache, and the number of the event that comes next."""
        with self.lock:
            return self.pool.digests(), self.pool.journal.end

    # -- stepping ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        with self.lock:
            work = self.scheduler.has_work or self._compiling or self._untold or self._under_way
            return bool(work)

    @property
    def launcher(self) -> Launcher | None:
        """What launches steps ahead; None: each is over before the next begins. Drafts are made of the tokens
        before them, so they forbid it."""
        return self.runner.launcher if self.speculator is None else None

    @property
    def computing(self) -> bool:
        """Whether a step is under way though :meth:`step` does not run."""
        return self._under_way is not None

    def step(self) -> list[SequenceOutput]:
        """Computes one step and returns an output for every sequence that computed something.

        Empty although there is work: everything waits for grammars, or for blocks that holds, pins or
        reservations keep (``stalled``), or all that the step computed was surplus. If the model raises, the
        step counts as not done, and the exception goes on to the caller.
        """
        step = self._under_way or self._launch(ahead=False)
        self._under_way = step
        self.stalled = step is None
        if step is None:
            with self.lock:
                untold, self._untold = self._untold, []
            return untold
        following = None
        if self.launcher is not None and not step.batch.starved:
            following = self._launch(ahead=True)
        outputs = self._complete(step, following)
        self._under_way = following
        if following is not None:
            self._choose(following, outputs)
        return outputs

    def _launch(self, ahead: bool) -> _StepUnderWay | None:
        """Schedules a step and launches it; None if there is nothing to compute. ``ahead``: another one is
        under way."""
        drafts = {} if ahead else self._draft()
        with self.lock:
            batch = self.scheduler.schedule(drafts, ahead=ahead)
            self.copy_blocks()
            self.scheduler.begin(batch)
        if not batch.items:
            return None
        self._tell_started(batch)
        began = time.monotonic()
        if self.host is not None:
            self.host.join()
        launcher = self.launcher
        if launcher is None:
            return _StepUnderWay(batch, _WholeStep(self.runner, batch), began)
        try:
            step = _StepUnderWay(batch, launcher.launch(batch), began)
            if not ahead:
                step.pending.choose()
        except BaseException:
            with self.lock:
                self.scheduler.land(batch, copied=False)
            raise
        return step

    def _choose(self, step: _StepUnderWay, outputs: list[SequenceOutput]) -> None:
        """Launches the choice of a step's tokens. If that fails the step counts as not done, and ``outputs``,
        of the step before, are returned by the next call of :meth:`step`."""
        try:
            step.pending.choose()
        except BaseException:
            with self.lock:
                self.scheduler.land(step.batch, copied=False)
                self._untold = outputs + self._untold
            self._under_way = None
            raise

    def _complete(self, step: _StepUnderWay, following: _StepUnderWay | None) -> list[SequenceOutput]:
        """Waits for the results of a step, and applies them. If there are none, no step is under way."""
        batch = step.batch
        try:
            result = step.pending.result()
        except BaseException:
            with self.lock:
                for failed in (following, step):
                    if failed is not None:
                        self.scheduler.land(failed.batch, copied=False)
            self._under_way = None
            raise
        ended = time.monotonic()
        forward = Span(max(step.began, self._ended_at), ended)
        self._ended_at = ended
        with self.lock:
            self._measure(batch, forward)
            untold, self._untold = self._untold, []
            outputs = untold + self._apply(batch, result, forward)
        self._observe(batch, result)
        return outputs

    def _tell_started(self, batch: ScheduledBatch) -> None:
        started = [item.sequence for item in batch.items if not item.sequence.started]
        now = time.monotonic() if started else 0.0
        for seq in started:
            seq.started, seq.began_at = True, now
            if seq.clock is not None:
                seq.clock.started = now
        if started:
            self.on_start(started)

    def _draft(self) -> dict[Sequence, list[int]]:
        """Drafts of the tokens that may follow the sequences that decode. Not under the lock: the drafter may
        be a model."""
        if self.speculator is None:
            return {}
        with self.lock:
            self.speculator.forget_ended()
            sequences = self.scheduler.drafting
        return self.speculator.draft(sequences)

    def _observe(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Shows the drafter the hidden states of the tokens that were computed and kept."""
        if self.speculator is None or result.hidden is None:
            return
        start = 0
        for seq, num_new, *_ in batch.items:
            kept = len(result.verified[seq]) if seq in result.verified else num_new
            if seq.status is SequenceStatus.RUNNING and seq.params.beam_search is None:
                rows = result.hidden[start : start + kept]
                self.speculator.observe(seq, seq.num_computed - kept, rows)
            start += num_new

    def stats(self) -> EngineStats:
        """How busy the engine is, and what it has done. Any thread."""
        with self.lock:
            scheduler = self.scheduler
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(scheduler.joining) + len(self._compiling),
                held=len(scheduler.held),
                waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
                blocks=self.pool.stats(),
                blocks_reserved=scheduler.reserved_blocks,
                pace=self._pace.stats(),
                work=self._work,
                scheduler=scheduler.counters.copy(),
                generated_tokens=self.generated_tokens,
                host_tier=self._host_tier(),
                speculation=self.speculator.stats if self.speculator else NO_DRAFTS,
                late_builds=self.late_builds.count if self.late_builds else 0,
            )

    def _host_tier(self) -> HostTierStats:
        tier, host = self.scheduler.tier, self.host
        return HostTierStats() if tier is None or host is None else tier.stats(host.copied)

    def _measure(self, batch: ScheduledBatch, forward: Span) -> None:
        """Records the cost of prompts, which the host tier weighs its copies against, and the speed of the
        steps."""
        seconds = forward.ended - forward.began
        chunks = (item for item in batch.items[batch.num_single :] if item.sequence not in batch.drafts)
        tokens = sum(item.num_new for item in chunks)
        self._pace.step(batch.num_single + len(batch.drafts), tokens, seconds)
        self._work = self._work.plus(seconds, len(batch.items), tokens)
        if self.scheduler.tier is not None:
            self.scheduler.tier.break_even.computed(tokens, seconds)

    def _apply(self, batch: ScheduledBatch, result: StepResult, forward: Span) -> list[SequenceOutput]:
        for seq, part in result.prompt_logprobs.items():
            seq.add_prompt_logprobs(part)
        for seq, num_new, _, _ in batch.items:
            drafts = batch.drafts.get(seq, ()) if batch.drafts else ()
            self.scheduler.advance(seq, num_new - len(drafts))
        self.scheduler.land(batch)
        outputs: list[SequenceOutput] = []
        for seq, _, _, _ in batch.items:
            if seq.status is SequenceStatus.FINISHED:
                continue
            verified = result.verified.get(seq) if result.verified else None
            if verified is None:
                outputs += self._publish(seq, result, forward)
            else:
                outputs.append(self._publish_verified(seq, verified, len(batch.drafts[seq]), forward))
        return outputs

    def _publish(self, seq: Sequence, result: StepResult, forward: Span) -> list[SequenceOutput]:
        """The output of a sequence and, with its first token, the outputs of its forks."""
        at = seq.num_computed
        error = result.errors.get(seq) if result.errors else None
        if error is not None:
            self._finish(seq, FinishReason.ERROR)
            return [SequenceOutput(seq, (), FinishReason.ERROR, at, forward, error=error)]
        candidates = result.candidates.get(seq) if result.candidates else None
        if candidates is not None:
            return [SequenceOutput(seq, (), None, at, forward), *self._search(seq, candidates, forward)]
        sampled = result.tokens.get(seq)
        if sampled is None:
            return [SequenceOutput(seq, (), None, at, forward)]
        if len(sampled) == 1 and not seq.hold_after_prefill:  # nearly always
            reason = self._extend(seq, sampled[0])
            if reason is not None:
                self._finish(seq, reason)
            return [SequenceOutput(seq, (sampled[0].token,), reason, at, forward, seq.details)]
        children = [seq.fork(number) for number in range(len(sampled) - 1)]
        reasons = [self._extend(one, new) for one, new in zip((seq, *children), sampled, strict=True)]
        outputs = [
            SequenceOutput(child, (new.token,), reason, at, forward, child.details)
            for child, new, reason in zip(children, sampled[1:], reasons[1:], strict=True)
        ]
        held = seq.hold_after_prefill and None in reasons
        for child, reason in zip(children, reasons[1:], strict=True):
            if reason is not None or held:
                child.status, child.finish_reason = SequenceStatus.FINISHED, reason
            else:
                self._adopt(child, seq)
        if held:
            seq.forked = tuple(children)
            self.scheduler.hold(seq)
        elif reasons[0] is not None:
            self._finish(seq, reasons[0])
        return [SequenceOutput(seq, (sampled[0].token,), reasons[0], at, forward, seq.details), *outputs]

    def _publish_verified(
        self, seq: Sequence, verified: list[Sampled], num_drafts: int, forward: Span
    ) -> SequenceOutput:
        """The output of a sequence that had drafts. It may end in the middle of the accepted ones."""
        reason = None
        taken = 0
        while reason is None and taken < len(verified):
            reason = self._extend(seq, verified[taken])
            taken += 1
        told = [new.logprobs for new in verified[:taken] if new.logprobs is not None]
        details = TokenDetails(Logprobs.join(told)) if told else None
        self.scheduler.accept_drafts(seq, taken - 1)
        if self.speculator is not None:
            self.speculator.verified(seq, num_drafts, min(taken, len(verified) - 1))
        at = seq.num_computed
        if reason is not None:
            self._finish(seq, reason)
        tokens = tuple(new.token for new in verified[:taken])
        return SequenceOutput(seq, tokens, reason, at, forward, details)

    def _extend(self, seq: Sequence, sampled: Sampled) -> FinishReason | None:
        seq.append(sampled.token, sampled.logprobs)
        self.generated_tokens += 1
        return finish_reason(seq, self.eos_token_ids)

    def _adopt(self, child: Sequence, parent: Sequence) -> None:
        """Makes a fork a sequence like any other from here on, unless a newer attempt of it is here."""
        try:
            self._check_attempt(child)
        except ValueError as error:
            log.warning("a fork came too late: %s", error)
            child.status = SequenceStatus.FINISHED
            return
        child.rules = None if parent.rules is None else parent.rules.fork()
        if parent.guide is not None:
            child.guide = self.runner.guide(parent.guide.grammar, child.params, self.eos_token_ids)
        self.scheduler.adopt(child, parent)
        self._replace_attempt(child)

    # -- beam searches -----------------------------------------------------------------------------------

    def admit_beams(self, seq: Sequence, candidates: Candidates, arrived: Arriving) -> None:
        """Begins the beam search of a request that arrived by handoff, with the candidates after its prompt,
        whose KV has arrived; takes over one reference on each page. The answers come with the steps, even if
        the search is over at once. ValueError as for :meth:`add`; the blocks are free then."""
        with self.lock:
            try:
                self._prepare(seq)
                self._check_attempt(seq)
                self._checks.check_candidates(candidates, seq.num_candidates)
                self.scheduler.accept(seq)
                group = self._group(seq)
                members = group.begin(candidates)
                for member in members:
                    self.pool.ref(arrived.pages)
                    member.arrive(arrived)
                    self.scheduler.join(member)
            finally:
                self.pool.free(arrived.pages)
            self._replace_attempt(seq)
            if members:
                self._groups[seq] = group
            else:
                self._discard(seq, None)
                self._forget(seq)
                now = time.monotonic()
                self._untold += self._answers(group, Span(now, now))
        self.work.set()

    def _group(self, leader: Sequence) -> BeamGroup:
        return BeamGroup(leader, stop_ids(leader.params, self.eos_token_ids))

    def _search(self, seq: Sequence, candidates: Candidates, forward: Span) -> list[SequenceOutput]:
        """Takes the candidates that may follow a beam. Returns the answers, if its search ends with them."""
        if seq.hold_after_prefill:
            seq.candidates = candidates
            self.scheduler.hold(seq)
            return []
        if seq.mates:
            group = self._groups[seq.mates[0]]
            if not group.take(seq, candidates) or group.advance(self.pool):
                return []
        else:
            group = self._group(seq)
            members = group.begin(candidates)
            if members:
                self._groups[seq] = group
                for member in members[1:]:
                    self.scheduler.adopt(member, seq)
                return []
        for member in group.members:
            self._finish(member, None)
        return self._answers(group, forward)

    def _answers(self, group: BeamGroup, forward: Span) -> list[SequenceOutput]:
        tokens = group.answers()
        self.generated_tokens += len(tokens)
        return [_output(token, forward) for token in tokens]

    # -- grammars ----------------------------------------------------------------------------------------

    def _grammar_of(self, seq: Sequence) -> Future[Grammar] | None:
        if seq.params.structured_output is None:
            return None
        if self.grammars is None:
            raise ValueError("this worker cannot guide outputs")
        return self.grammars.compile(seq.params.structured_output, tenant_of(seq.cache_salt))

    def _enter(self, seq: Sequence, needs: SequenceNeeds, admit: Callable[[Sequence], None]) -> None:
        """Admits a sequence now or, if something that it needs is still being made, as soon as that is
        done."""
        if needs.pending:
            self.scheduler.check(seq)
            self._compiling[seq] = admit
        else:
            self._admit(seq, needs, admit)

    def _admit(self, seq: Sequence, needs: SequenceNeeds, admit: Callable[[Sequence], None]) -> None:
        grammar = needs.compiled
        if grammar is not None:
            seq.guide = self.runner.guide(grammar, seq.params, self.eos_token_ids)
        admit(seq)

    def _await(self, seq: Sequence, needs: SequenceNeeds) -> None:
        for pending in needs.pending:
            pending.add_done_callback(lambda _: self._admit_equipped(seq, needs))
        if seq in self._compiling and not needs.pending:  # all was done meanwhile
            self._admit_equipped(seq, needs)
        self.work.set()

    def _admit_equipped(self, seq: Sequence, needs: SequenceNeeds) -> None:
        """Admits a sequence that has waited for what it needs, once all of that is done, or ends it if its
        grammar is refused. Runs on the thread that has made the last of it."""
        if needs.pending:
            return
        with self.lock:
            admit = self._compiling.pop(seq, None)
            if admit is None:  # cancelled, or admitted
                return
            try:
                self._admit(seq, needs, admit)
            except ValueError as error:
                self._discard(seq, FinishReason.ERROR)
                self._forget(seq)
                now = time.monotonic()
                blameless = isinstance(error, GrammarBusyError) or not isinstance(error, GrammarError)
                self._untold.append(
                    SequenceOutput(
                        seq,
                        (),
                        FinishReason.ERROR,
                        0,
                        Span(now, now),
                        error=str(error),
                        blameless=blameless,
                    )
                )
        self.work.set()

    def _discard(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Ends a sequence that the scheduler does not know."""
        self.pool.free(seq.unbind_all())
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    # -- the table of requests ---------------------------------------------------------------------------

    def _end(self, seq: Sequence) -> None:
        for one in seq.mates or (seq,):
            self._finish(one, FinishReason.CANCELLED)

    def _finish(self, seq: Sequence, reason: FinishReason | None) -> None:
        if self._compiling.pop(seq, None) is None:
            self.scheduler.finish(seq, reason)
        else:
            self._discard(seq, reason)
        self._forget(seq)
        if self.speculator is not None:
            self.speculator.ended(seq)

    def _forget(self, seq: Sequence) -> None:
        self._groups.pop(seq, None)
        if self._sequences.get(seq.request_id) is seq:
            del self._sequences[seq.request_id]

    def _check_attempt(self, seq: Sequence) -> None:
        known = self._sequences.get(seq.request_id)
        if known is not None and known.attempt >= seq.attempt:
            raise ValueError(
                f"request {seq.request_id}: attempt {seq.attempt} came while attempt {known.attempt} is here"
            )

    def _replace_attempt(self, seq: Sequence) -> None:
        older = self._sequences.get(seq.request_id)
        self._sequences[seq.request_id] = seq
        if older is not None:
            self._end(older)

    def _prepare(self, seq: Sequence, like: Sequence | None = None) -> SequenceNeeds:
        """Checks a new sequence and derives what the engine needs of it. ``like`` is prepared, and another
        answer to the same prompt. Not under the lock: a long prompt takes long."""
        alike = like is not None and seq.answers_like(like)
        if alike:
            self._checks.check_outputs(seq)
        else:
            self._checks.check(seq)
        seq.accepted_at = time.monotonic()
        words: Future[BadWords] | None = None
        if like is not None and alike:
            seq.rules = None if like.rules is None else like.rules.fork()
            words = None if seq.rules is None else seq.rules.bad_words
        else:
            if seq.params.bad_word_ids:
                words = self._bad_words.build(seq.params.bad_word_ids, tenant_of(seq.cache_salt))
            seq.rules = self._rules_of(seq, words)
        seq.num_candidates = self._num_candidates(seq.params)
        if self.scheduler.limits.shares(seq):
            seq.extend_hashes(self.pool.block_size, self.pool.kv_dtype)
        return SequenceNeeds(self._grammar_of(seq), words)

    def _rules_of(self, seq: Sequence, words: Future[BadWords] | None) -> LogitRules | None:
        params = seq.params
        if params.structured_output is not None:  # the guide heeds min_tokens, as far as the grammar lets it
            params = replace(params, min_tokens=0)
        return self.runner.rules(params, seq.prompt_ids, self.eos_token_ids, words)

    def _num_candidates(self, params: ResolvedSampling) -> int:
        if params.beam_search is None:
            return 0
        num_stops = len(stop_ids(params, self.eos_token_ids))
        return max(Candidates.needed(params.beam_search.width, num_stops), params.logprobs or 0)


def _output(token: AnswerToken, forward: Span) -> SequenceOutput:
    """A token of an answer from a beam search, as if a step had computed it just now."""
    at = token.answer.num_prompt + token.index
    return SequenceOutput(token.answer, (token.token,), token.finish_reason, at, forward, token.details)
