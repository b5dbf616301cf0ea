"""The engine: schedule → forward → sample → publish, one step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.block_pool import BlockPool
from baton.engine.break_even import BreakEven
from baton.engine.config import EngineConfig
from baton.engine.host_memory import HostMemory
from baton.engine.host_tier import HostTier
from baton.engine.logits import LogitRules
from baton.engine.runner import ModelRunner, StepResult
from baton.engine.scheduler import ScheduledBatch, Scheduler
from baton.engine.sequence import FinishReason, Sequence, Status
from baton.engine.startup import build_runner
from baton.engine.stop import finish_reason
from baton.logprobs import TokenDetails
from baton.models.loader import Progress
from baton.sampling_params import SamplingParams


class Span(NamedTuple):
    """When something ran, in seconds on this process's monotonic clock."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step did for one sequence."""

    seq: Sequence
    new_token: int | None
    """Already in ``seq.output_ids``; None while the prompt is being computed."""
    finish_reason: FinishReason | None
    advanced_to: int
    """``num_computed`` after the step: the KV of this many tokens is in the blocks. Less than it was before
    if the sequence was preempted in between, and the blocks are others then."""
    forward: Span
    """Of the step."""
    details: TokenDetails | None = None
    """Of the new token, if the request asked for any."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The host tier; blocks and bytes that moved are since the start. All zero without one."""

    blocks_used: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    swapped_in: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, and what it has done since it started."""

    running: int
    waiting: int
    """In the queue, or arrived by handoff and without a seat."""
    held: int
    """Prefilled, for a handoff."""
    waiting_prefill_tokens: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_reserved: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    host: HostLoad


class Engine:
    """Runs sequences on one model. One thread calls :meth:`step`; any thread may call the rest.

    ``lock`` guards the scheduler and the pool. A step takes it to schedule and again to apply the results,
    and never during the forward pass, so that others can bind, pin and free blocks meanwhile. Sequences in a
    running pass keep their blocks until it is over, even if they are cancelled: its kernels may still write
    there.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        host: HostMemory | None = None,
    ) -> None:
        """``host`` holds the bytes of the scheduler's host tier."""
        self.lock = threading.RLock()
        self.work = threading.Event()
        """Set whenever there may be something to step that was not there before."""
        self.runner = runner
        self.scheduler = scheduler
        self.host = host
        # Of ids beyond the vocabulary, which some configurations name, none can come.
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self.vocab_size = vocab_size
        self.generated_tokens = 0
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: frozenset[Sequence] = frozenset()

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Loads the model, sizes the KV pool and warms up. ValueError if config and model do not agree or
        do not fit on the device; ``progress`` hears of bytes of weights read."""
        built = build_runner(config, progress)
        limits = config.limits(built.model_config.max_model_len, built.model_config.longest_shared_prompt)
        tier = host = None
        if built.num_host_blocks:
            break_even = BreakEven(config.block_size)
            tier = HostTier(built.num_host_blocks, break_even)
            host = HostMemory(built.runner.pool, built.num_host_blocks, break_even)
        pool = BlockPool(built.num_blocks, config.block_size, tier.save if tier else None)
        scheduler = Scheduler(limits, pool, tier)
        eos = frozenset(built.model_config.eos_token_ids)
        return cls(built.runner, scheduler, eos, built.model_config.vocab_size, host)

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """Who owns which block. Use it under ``lock``."""
        return self.scheduler.pool

    def add(self, seq: Sequence) -> None:
        """Queues a sequence; it takes the place of an older attempt of the same request.

        ValueError if it could never run here, if a token id is out of range, or if this attempt or a newer
        one of the request is here already.
        """
        self._prepare(seq)
        with self.lock:
            self._check_attempt(seq)
            self.scheduler.add(seq)
            self._replace_attempt(seq)
        self.work.set()

    def check(self, seq: Sequence) -> None:
        """Raises the ValueError that :meth:`add` would raise for a sequence that could never run here."""
        self._check_ids(seq.token_ids)
        self._check_params(seq.params)
        self.scheduler.check(seq)

    def admit_computed(self, seq: Sequence) -> None:
        """Joins a sequence that arrived by handoff: its ``block_ids`` hold the KV of all its tokens but the
        last, which is an output. Takes over one reference on each block, and enters full ones into the
        prefix index. ValueError as for :meth:`add`, or if blocks and tokens do not match: then the blocks
        remain the caller's.
        """
        self._prepare(seq)
        with self.lock:
            self._check_attempt(seq)
            self.scheduler.admit_computed(seq)
            self._replace_attempt(seq)
        self.work.set()

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
            return [seq for seq in self._sequences.values() if seq.urgency.overdue(now)]

    def has_any_of(self, owner: str) -> bool:
        """Whether a request of this owner is here."""
        with self.lock:
            return any(seq.owner == owner for seq in self._sequences.values())

    def cancel_all_of(self, owner: str) -> None:
        """Ends every request of an owner that is gone."""
        with self.lock:
            for seq in [seq for seq in self._sequences.values() if seq.owner == owner]:
                self.cancel(seq.request_id, seq.attempt)

    def release(self, seq: Sequence) -> bool:
        """Forgets a held sequence and frees its blocks; False if it is not held (any more)."""
        with self.lock:
            if seq.status is not Status.HELD:
                return False
            self._finish(seq, None)
            return True

    # -- handoffs that are to arrive ---------------------------------------------------------------------

    def reserve(self, blocks: int, turn: float = 0.0) -> bool:
        """Promises ``blocks`` blocks to a handoff whose turn that is; False if those here need them or
        somebody waits whose turn is not later."""
        with self.lock:
            return self.scheduler.reserve(blocks, turn)

    def copy_blocks(self) -> None:
        """Makes the copies between pool and host tier that are due. Whoever allocates from the pool, or has a
        prefix matched, calls it before the lock is free."""
        with self.lock:
            if self.host is not None and self.scheduler.tier is not None:
                self.host.carry_out(self.scheduler.tier.take_plan())

    def unreserve(self, blocks: int) -> None:
        """Takes a promise back: the handoff is over, or is about to bind its blocks."""
        with self.lock:
            if blocks > self.scheduler.reserved_blocks:
                raise ValueError(f"unreserve({blocks}) with {self.scheduler.reserved_blocks} blocks reserved")
            self.scheduler.reserved_blocks -= blocks

    # -- stepping ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        with self.lock:
            return self.scheduler.has_work

    def step(self) -> list[SequenceOutput]:
        """Computes one step and returns an output for every sequence that computed something.

        Empty although there is work: everything waits for blocks that holds, pins or reservations keep. If
        the model raises, the step counts as not done, and the exception goes on to the caller.
        """
        with self.lock:
            batch = self.scheduler.schedule()
            self.copy_blocks()
            self._in_flight = frozenset(item.sequence for item in batch.items)
        if not batch.items:
            return []
        began = time.monotonic()
        try:
            result = self.runner.run(batch)
        except BaseException:
            with self.lock:
                self._land()
            raise
        forward = Span(began, time.monotonic())
        with self.lock:
            self._measure(batch, forward)
            return self._apply(batch, result, forward)

    def load(self) -> Load:
        with self.lock:
            scheduler, pool = self.scheduler, self.pool
            return Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(scheduler.joining),
                held=len(scheduler.held),
                waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
                blocks_free=pool.num_free,
                blocks_cached=pool.num_cached,
                blocks_held=pool.num_held,
                blocks_reserved=scheduler.reserved_blocks,
                preemptions=scheduler.preemptions,
                prefix_queried_tokens=scheduler.prefix_queried_tokens,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                generated_tokens=self.generated_tokens,
                host=self._host_load(),
            )

    def _host_load(self) -> HostLoad:
        tier, host = self.scheduler.tier, self.host
        if tier is None or host is None:
            return HostLoad()
        counters = tier.counters
        return HostLoad(
            blocks_used=tier.num_used,
            blocks=tier.num_slots,
            hit_blocks=counters.restored,
            saved_blocks=counters.saved,
            evicted_blocks=counters.evicted,
            dropped_blocks=counters.dropped,
            saved_bytes=host.saved_bytes,
            restored_bytes=host.restored_bytes,
            swapped_in=self.scheduler.swapped_in,
        )

    def _measure(self, batch: ScheduledBatch, forward: Span) -> None:
        """What prompts cost, for the host tier to weigh its copies against."""
        if self.scheduler.tier is not None:
            tokens = sum(item.num_new for item in batch.items[batch.num_single :])
            self.scheduler.tier.break_even.computed(tokens, forward.ended - forward.began)

    def _apply(self, batch: ScheduledBatch, result: StepResult, forward: Span) -> list[SequenceOutput]:
        for seq, part in result.prompt_logprobs.items():
            seq.add_prompt_logprobs(part)
        for seq, num_new in batch.items:
            self.scheduler.advance(seq, num_new)
        self._land()
        return [
            self._publish(seq, result, forward) for seq, _ in batch.items if seq.status is not Status.FINISHED
        ]

    def _land(self) -> None:
        """The forward pass is over: ends what was cancelled while it ran."""
        landed, self._in_flight = self._in_flight, frozenset()
        for seq in landed:
            if seq.cancelled:
                self._finish(seq, FinishReason.CANCELLED)

    def _publish(self, seq: Sequence, result: StepResult, forward: Span) -> SequenceOutput:
        advanced_to = seq.num_computed
        token = result.tokens.get(seq)
        if token is None:
            return SequenceOutput(seq, None, None, advanced_to, forward)
        seq.append(token, result.logprobs.get(seq))
        self.generated_tokens += 1
        reason = finish_reason(seq, self.eos_token_ids)
        if reason is not None:
            self._finish(seq, reason)
        elif seq.hold_after_prefill:
            self.scheduler.hold(seq)
        return SequenceOutput(seq, token, reason, advanced_to, forward, seq.details)

    # -- the table of requests ---------------------------------------------------------------------------

    def _end(self, seq: Sequence) -> None:
        if seq in self._in_flight:
            seq.cancelled = True
        else:
            self._finish(seq, FinishReason.CANCELLED)

    def _finish(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.scheduler.finish(seq, reason)
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

    def _prepare(self, seq: Sequence) -> None:
        """Checks a new sequence and derives what the engine needs of it. Not under the lock: that takes long
        for a long prompt."""
        self._check_ids(seq.token_ids)
        self._check_params(seq.params)
        seq.rules = LogitRules.of(seq.params, seq.prompt_ids, self.eos_token_ids)
        if self.scheduler.limits.shares(seq):
            seq.extend_hashes(self.pool.block_size)

    def _check_params(self, params: SamplingParams) -> None:
        """Like a bad id, a step with nothing to choose from would fail others too."""
        if not params.shapes_logits:
            return
        biased = [token for token, _ in params.logit_bias]
        for named in (biased, params.allowed_token_ids, params.stop_token_ids, *params.bad_word_ids):
            self._check_ids(named)
        if not params.leaves_a_token(self.vocab_size, self.eos_token_ids):
            raise ValueError("allowed_token_ids, bad_words and min_tokens leave no token to be generated")

    def _check_ids(self, token_ids: Collection[int]) -> None:
        """One bad id would fail the whole batch it is computed in."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(
                f"token ids from {min(token_ids)} to {max(token_ids)}; allowed: 0 to {self.vocab_size - 1}"
            )
