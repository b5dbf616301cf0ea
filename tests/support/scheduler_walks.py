"""Random histories of an engine whose tokens are drawn, not computed, with a measure of its progress.

The measure is a row of triples, one for each sequence in the order of the queue: its outputs, its tokens
whose KV is in blocks or being computed, and those of them that are computed. An ended sequence counts as more
than any triple. Unless something comes from outside, every step must make the row greater, in lexicographic
order: preemption may only take from sequences behind one that gained. As outputs, tokens and sequences are
bounded, no history that keeps to this can go on for ever. A step in which nothing can be computed although
there is work, and although nothing outside holds blocks, is a deadlock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.execution import PendingStep, Sampled, StepResult
from baton.engine.kv.arriving import Arriving
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.host_tier import CopiedBytes, CopyPlan, HostTier
from baton.engine.sampling.beams import Candidates
from baton.engine.scheduler import BeamsDoNotFitError, ScheduledBatch, Scheduler, SchedulerLimits
from baton.engine.sequence import Fork, Sequence
from baton.grammar.table import Grammar
from tests.support.fake_engine import AlwaysCopy
from tests.support.grouped_model import KEPT, layout_of

VOCAB_SIZE = 12
LENGTHS = (1, 1, 2, 3, 5, 8, 10, 12)
MAX_TOKENS = (1, 2, 4, 9, 14)
LAYERS = (None, None, None, *KEPT)
ENDED = (math.inf, 0, 0)

Measure = dict[tuple[float, int], tuple[float, int, int]]
"""Outputs, scheduled and computed tokens of each living sequence, by its place in the order."""


class PassFailedError(RuntimeError):
    """A forward pass that raised."""


class DrawnStep:
    """A step whose tokens are drawn when its result is asked for."""

    def __init__(self, runner: DrawingRunner, batch: ScheduledBatch) -> None:
        self._runner = runner
        self._batch = batch

    def choose(self) -> None: ...

    def result(self) -> StepResult:
        return self._runner.run(self._batch)


class DrawingRunner:
    """``baton.engine.execution.Runner`` without a model: it draws tokens, and candidates of beams."""

    ranks = None

    def __init__(self, draw: random.Random, ahead: bool, failing: float) -> None:
        """``failing``: how often a pass raises."""
        self.keeps_hidden = False
        self.launcher = self if ahead else None
        self._draw = draw
        self._failing = failing

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        return DrawnStep(self, batch)

    def run(self, batch: ScheduledBatch) -> StepResult:
        if self._draw.random() < self._failing:
            raise PassFailedError
        result = StepResult()
        for seq, _, _, chooses in batch.items:
            if not chooses:
                continue
            if seq.num_candidates:
                result.candidates[seq] = drawn_candidates(self._draw, seq.num_candidates)
                continue
            answers = 1 + (0 if seq.output_ids else len(seq.forks))
            result.tokens[seq] = [Sampled(self._draw.randrange(VOCAB_SIZE), None) for _ in range(answers)]
        return result

    def rules(self, *_: object) -> None:
        return None

    def guide(self, grammar: Grammar, params: ResolvedSampling, eos_token_ids: frozenset[int]) -> None:
        raise AssertionError("nothing is guided here")

    def enter(self) -> None: ...

    def leave(self) -> None: ...


def drawn_candidates(draw: random.Random, count: int) -> Candidates:
    """Candidates whose scores differ enough for beams to take over from each other often."""
    scores = sorted((-0.01 - 8 * draw.random() for _ in range(count)), reverse=True)
    return Candidates(draw.sample(range(VOCAB_SIZE), count), scores)


class NoBytes:
    """A host tier's memory without memory: copies are counted as made."""

    def __init__(self) -> None:
        self.copied = CopiedBytes()

    def carry_out(self, plan: CopyPlan) -> None: ...

    def join(self) -> None: ...


@dataclass
class Outside:
    """What holds blocks and is no sequence here."""

    taken: list[list[int]] = field(default_factory=list)
    promised: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.taken or self.promised)


class Walk:
    """One history: everything in it follows from ``seed``."""

    def __init__(self, seed: int, scheduler: type[Scheduler] = Scheduler) -> None:
        self.draw = draw = random.Random(seed)
        self.block_size = draw.choice((1, 2, 2, 3))
        self.kept = draw.choice(LAYERS)
        self.requests = [self._request(number) for number in range(draw.randint(1, 5))]
        widest = max(params.beam_search.width if params.beam_search else 1 for _, params, _ in self.requests)
        seats = max(widest, draw.randint(1, 6))
        self.limits = SchedulerLimits(
            max_num_seqs=seats,
            max_num_batched_tokens=max(seats, draw.choice((1, 4, 6, 12))),  # fewer are refused
            prefill_chunk=draw.choice((1, 2, 5, 16)),
            max_model_len=64,
            chunked_prefill=draw.random() < 0.5,
            prefix_caching=draw.random() < 0.5,
            priority_aging=10.0,
            mixed_prefill_tokens=draw.choice((None, None, 1, 3)),
        )
        self.ahead = draw.random() < 0.6
        self.host_blocks = draw.choice((0, 0, 0, 8))
        self.engine = self._engine(scheduler)
        self.outside = Outside()
        self.gap = draw.choice((0, 1, 3, 7))
        self.meddling = draw.choice((0.0, 0.0, 0.02, 0.1))

    def _request(self, number: int) -> tuple[int, ResolvedSampling, int]:
        """A prompt's length, parameters, and how many answers there are besides the first."""
        draw = self.draw
        length, max_tokens = draw.choice(LENGTHS), draw.choice(MAX_TOKENS)
        if draw.random() < 0.5:
            return length, ResolvedSampling(max_tokens=max_tokens), draw.choice((0, 0, 0, 1, 2))
        width = draw.randint(1, 4)
        beams = BeamParams(width, draw.choice((-1.0, 0.0, 1.0)), draw.choice(list(EarlyStopping)))
        stops = frozenset(range(draw.choice((0, 0, 1, 2))))
        params = ResolvedSampling(max_tokens=max_tokens, stop_token_ids=stops, beam_search=beams)
        return length, params, width - 1

    def _engine(self, scheduler: type[Scheduler]) -> Engine:
        """An engine whose pool has hardly more pages than its largest request needs."""
        runner = DrawingRunner(self.draw, self.ahead, self.draw.choice((0.0, 0.0, 0.0, 0.01)))
        layout = None if self.kept is None else layout_of(self.kept, self.block_size)

        def made(pages: int) -> Scheduler:
            tier = HostTier(self.host_blocks, AlwaysCopy(self.block_size)) if self.host_blocks else None
            pool = BlockPool(pages, self.block_size, tier.save if tier else None)
            return scheduler(self.limits, pool, tier, layout)

        sequences = [self._sequence(number) for number in range(len(self.requests))]
        least, enough = 0, 1
        while not _fit(made(enough), sequences):
            least, enough = enough, 2 * enough
        while enough - least > 1:
            middle = (least + enough) // 2
            least, enough = (least, middle) if _fit(made(middle), sequences) else (middle, enough)
        chosen = made(enough + self.draw.choice((0, 0, 0, 1, 2, 4)))
        host = NoBytes() if self.host_blocks else None
        return Engine(runner, chosen, frozenset(), VOCAB_SIZE, host)  # type: ignore[arg-type]

    def _sequence(self, number: int) -> Sequence:
        length, params, others = self.requests[number]
        step = 1 if number % 2 else 7
        ids = tuple((at * step + number // 2) % VOCAB_SIZE for at in range(length))
        forks = tuple(Fork(f"{number}/{other}", params) for other in range(1, others + 1))
        return Sequence(str(number), 1, ids, params, forks=forks)

    def run(self, see: Callable[[int], object], max_steps: int = 4000) -> str | None:
        """Steps until all is done. ``see`` hears of each state's hash; returns what went wrong."""
        coming = list(range(len(self.requests)))
        last: Measure = {}
        for step in range(max_steps):
            outside = bool(coming) and step % (self.gap + 1) == 0 and self._arrive(coming.pop(0))
            outside |= self.draw.random() < self.meddling and self._meddle()
            if not coming and not self.engine.has_work:
                self._let_go()
                for seq in list(self.engine.scheduler.held):
                    self.engine.release(seq)
                held = self.engine.pool.num_held
                return f"{held} pages are held at the end" if held else None
            try:
                self.engine.step()
            except PassFailedError:
                outside = True
            see(self.state())
            outside |= self._release_held()
            reached = self.measure()
            if self.engine.stalled and self.engine.has_work and not outside:
                if not self.outside:
                    return f"step {step}: nothing can be computed, and nothing outside holds blocks"
                self._let_go()
                outside = True
            if not outside and (why := fallen(last, reached)):
                return f"step {step}: {why}"
            last = reached
        return f"at work after {max_steps} steps"

    # -- what comes from outside ------------------------------------------------------------------------

    def _arrive(self, number: int) -> bool:
        seq = self._sequence(number)
        seq.priority = Priority(level=self.draw.choice((0, 0, 0, -1, 1)))
        try:
            if self.draw.random() < 0.3 and self._hand_over(seq):
                return True
            seq.hold_after_prefill = self.draw.random() < 0.1
            self.engine.add(seq)
        except BeamsDoNotFitError:
            return False
        return True

    def _hand_over(self, seq: Sequence) -> bool:
        """Lets a request come with its prompt computed elsewhere, if there is room."""
        engine = self.engine
        engine.check(seq)
        if not engine.reserve(seq.num_prompt, engine.scheduler.turn_of(seq)):
            return False
        engine.unreserve(seq.num_prompt)
        arriving = engine.bind_arriving(seq)
        assert arriving is not None
        self._admit(seq, arriving)
        return True

    def _admit(self, seq: Sequence, arriving: Arriving) -> None:
        if seq.params.beam_search is None:
            seq.forks = ()
            if seq.params.max_tokens == 1:  # it ended with its first token
                self.engine.free_pages(arriving.pages)
                return
            seq.append(self.draw.randrange(VOCAB_SIZE))
            seq.arrive(arriving)
            self.engine.admit_computed(seq)
            return
        count = Candidates.needed(seq.params.beam_search.width, len(seq.params.stop_token_ids))
        self.engine.admit_beams(seq, drawn_candidates(self.draw, count), arriving)

    def _meddle(self) -> bool:
        """Takes blocks, promises some, gives all back, or cancels a request."""
        engine, draw = self.engine, self.draw
        what = draw.randrange(4)
        if what == 0 and self.outside:
            self._let_go()
        elif what == 1 and (names := sorted(engine._sequences)):
            engine.cancel(draw.choice(names), 1)
        elif what == 2 and engine.pool.num_allocatable:
            taken = engine.pool.allocate(draw.randint(1, engine.pool.num_allocatable))
            self.outside.taken.append(taken or [])
            engine.copy_blocks()
        elif what == 3 and engine.reserve(tokens := draw.randint(1, 8)):
            self.outside.promised.append(tokens)
        return True

    def _let_go(self) -> None:
        for blocks in self.outside.taken:
            self.engine.pool.free(blocks)
        for tokens in self.outside.promised:
            self.engine.unreserve(tokens)
        self.outside = Outside()

    def _release_held(self) -> bool:
        released = False
        for seq in sorted(self.engine.scheduler.held, key=lambda seq: seq.place):
            if self.draw.random() < 0.5 or self.engine.stalled:
                released |= self.engine.release(seq)
        return released

    # -- what is seen -----------------------------------------------------------------------------------

    def _living(self) -> Iterable[tuple[int, Sequence]]:
        scheduler = self.engine.scheduler
        for number, queue in enumerate((scheduler.running, scheduler.joining, scheduler.waiting)):
            for seq in queue:
                yield number, seq

    def measure(self) -> Measure:
        return {
            seq.place: (seq.num_outputs, seq.num_scheduled, seq.num_computed) for _, seq in self._living()
        }

    def state(self) -> int:
        """A hash of all that the scheduler's choices depend on. Pages and tokens have no names in it: only
        which are the same."""
        scheduler, pool, names = self.engine.scheduler, self.engine.pool, dict[int, int]()
        ranks = {place: rank for rank, place in enumerate(sorted(seq.place for _, seq in self._living()))}

        def named(pages: Iterable[int]) -> tuple[int, ...]:
            return tuple(page if page < 0 else names.setdefault(page, len(names)) for page in pages)

        sequences = tuple(
            (
                queue,
                ranks[seq.place],
                (seq.num_prompt, seq.num_outputs, seq.num_computed, seq.num_under_way, seq.num_pending),
                (seq.max_len, seq.num_indexed, len(seq.forks), seq.hold_after_prefill, seq.keeps_state),
                tuple(named(table) for table in seq.tables),
                (named(seq.state_pages), named(seq.next_state)),
                tuple(seq.num_common(mate) for mate in seq.mates),
            )
            for queue, seq in self._living()
        )
        settings = (self.block_size, self.kept, pool.num_blocks, self.limits, self.ahead, self.host_blocks)
        rest = (pool.num_free, pool.num_cached, scheduler.reserved_blocks, len(scheduler.held))
        return hash((settings, sequences, rest, len(scheduler._copies)))


def fallen(before: Measure, after: Measure) -> str | None:
    """Where the measure is not greater than before; None if it is, or if there was nothing to do."""
    for place in sorted(before.keys() | after.keys()):
        was, now = before.get(place, (-1, 0, 0)), after.get(place, ENDED)
        if now > was:
            return None
        if now < was:
            return f"the sequence at {place} fell from {was} to {now}, and none before it gained"
    return "nothing has changed" if before else None


def _fit(scheduler: Scheduler, sequences: Items[Sequence]) -> bool:
    try:
        for seq in sequences:
            scheduler.check(seq)
            if scheduler.longest_sequence < seq.num_prompt + seq.params.max_tokens:
                return False
    except ValueError:
        return False
    return True
