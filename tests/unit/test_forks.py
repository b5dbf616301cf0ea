"""Several answers to one prompt: computed once, branched off with the first token, in shared blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.sequence import FinishReason, Fork, Sequence, SequenceStatus
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine, run, run_alone
from tests.support.runners import arrived, runner_of
from tests.unit.test_engine import HookedModel

pytestmark = pytest.mark.usefixtures("launched")

DRAWN = ResolvedSampling(max_tokens=14, seed=3, temperature=2.0, ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 29 + i * 13 + salt * 7 + 5) % VOCAB_SIZE for i in range(length)]


def params(number: int, like: ResolvedSampling = DRAWN) -> ResolvedSampling:
    return replace(like, seed=like.seed + 100 * number)


def forked(
    name: str, prompt_ids: list[int], n: int, like: ResolvedSampling = DRAWN, **options: object
) -> Sequence:
    forks = tuple(Fork(f"{name}-{i}", params(i, like)) for i in range(1, n))
    return Sequence(f"{name}-0", 1, prompt_ids, params(0, like), forks=forks, **options)  # type: ignore[arg-type]


def outputs(engine: Engine, *sequences: Sequence, max_steps: int = 2000) -> dict[str, list[int]]:
    """Request → its tokens, as they were told."""
    told: dict[str, list[int]] = {}
    for seq in sequences:
        engine.add(seq)
    for _ in range(max_steps):
        if not engine.has_work:
            return told
        for output in engine.step():
            if output.new_tokens:
                told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
    raise AssertionError(f"still at work after {max_steps} steps: {engine.stats()}")


def alone(name: str, prompt_ids: list[int], n: int, like: ResolvedSampling = DRAWN) -> dict[str, list[int]]:
    return {f"{name}-{i}": run_alone(prompt_ids, params(i, like)) for i in range(n)}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("n", [2, 5])
def test_each_answer_is_that_of_a_request_alone(length: int, n: int) -> None:
    engine = fake_engine()
    assert outputs(engine, forked("r", prompt(length), n)) == alone("r", prompt(length), n)
    load = engine.stats()
    assert (load.blocks.held, load.generated_tokens) == (0, 14 * n)
    # The last to write into a block that all share has it for itself.
    assert load.scheduler.copied_blocks == (0 if length % 4 == 0 else n - 1)


def test_the_prompt_is_computed_once() -> None:
    class Counting(FakeModel):
        tokens = 0

        def forward(self, token_ids, batch, pool):  # type: ignore[no-untyped-def]
            self.tokens += len(token_ids)
            return super().forward(token_ids, batch, pool)

    model = Counting(VOCAB_SIZE)
    outputs(fake_engine(model=model), forked("r", prompt(30), 4))
    assert model.tokens == 30 + 4 * (14 - 1)


@pytest.mark.parametrize("num_blocks", [12, 16, 24])
def test_in_a_pool_too_small_they_are_preempted_and_nothing_else_changes(num_blocks: int) -> None:
    engine = fake_engine(num_blocks)
    sequences = [forked(name, prompt(13 + i, i), 4) for i, name in enumerate("abc")]
    expected: dict[str, list[int]] = {}
    for i, name in enumerate("abc"):
        expected |= alone(name, prompt(13 + i, i), 4)
    assert outputs(engine, *sequences) == expected
    load = engine.stats()
    assert load.scheduler.preemptions > 0
    assert load.scheduler.copied_blocks > 0
    assert load.blocks.held == 0


def test_pages_for_a_state_of_its_own_go_back_when_nobody_shares_the_old_one() -> None:
    """The first answer takes pages for a state, then the pages of the others, which shared its own. Without
    the former it would wait for a block for ever."""
    engine = fake_engine(6, 2, kept="all", chunked_prefill=False, prefix_caching=False)
    like = replace(DRAWN, max_tokens=2)
    told = outputs(engine, forked("r", prompt(2), 3, like), max_steps=100)
    assert told == {f"r-{i}": run_alone(prompt(2), params(i, like), kept="all") for i in range(3)}
    assert engine.stats().scheduler.preemptions > 0
    assert engine.stats().blocks.held == 0


def test_a_snapshot_is_left_where_the_pool_has_room_only_without_it() -> None:
    """Behind a snapshot, which must stay as it is, a sequence needs a second state."""
    engine = fake_engine(13, 2, kept="state")
    like = replace(DRAWN, max_tokens=2)
    for length in (12, 20):
        told = run(engine, Sequence(f"r{length}", 1, prompt(length), like), max_steps=100)
        assert told == [run_alone(prompt(length), like, kept="state")]


def test_no_snapshot_is_kept_where_the_next_step_would_lack_its_pages() -> None:
    engine = fake_engine(4, 2, kept="state", prefill_chunk=2)
    like = replace(DRAWN, max_tokens=1)
    told = run(engine, Sequence("r", 1, prompt(3), like), max_steps=100)
    assert told == [run_alone(prompt(3), like, kept="state")]


def test_without_seats_they_wait() -> None:
    engine = fake_engine(max_num_seqs=2)
    assert outputs(engine, forked("r", prompt(9), 5)) == alone("r", prompt(9), 5)
    assert engine.stats().blocks.held == 0


def test_one_can_be_cancelled_and_the_others_go_on() -> None:
    engine = fake_engine()
    engine.add(forked("r", prompt(9), 3))
    told: dict[str, list[int]] = {}
    cancelled = False
    while engine.has_work:
        for output in engine.step():
            if output.new_tokens:
                told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
        if not cancelled and told:
            cancelled = engine.cancel("r-0", 1)
            assert cancelled
    expected = alone("r", prompt(9), 3)
    assert told["r-0"] == expected["r-0"][:1]
    assert (told["r-1"], told["r-2"]) == (expected["r-1"], expected["r-2"])
    assert engine.stats().blocks.held == 0


def test_cancelled_before_its_first_token_it_has_no_forks() -> None:
    model = HookedModel()
    engine = fake_engine(model=model)
    engine.add(forked("r", prompt(9), 3))
    model.hook = lambda: engine.cancel("r-0", 1)
    assert engine.step() == []
    assert not engine.has_work
    assert engine.stats().blocks.held == 0


def test_first_tokens_that_were_delivered_are_not_drawn_again() -> None:
    sequence = forked("r", prompt(9), 3)
    sequence.first_token = 50
    first, second = sequence.forks
    sequence.forks = (replace(first, first_token=60), second)
    told = outputs(fake_engine(), sequence)
    assert [told[f"r-{i}"][0] for i in range(2)] == [50, 60]
    for number, given in ((0, 50), (1, 60)):
        engine = fake_engine()
        resumed = Sequence("x", 1, prompt(9), params(number), output_ids=[given])
        assert outputs(engine, resumed)["x"] == told[f"r-{number}"][1:]
    assert told["r-2"] == run_alone(prompt(9), params(2))


@pytest.mark.parametrize("ending", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_held_until_none_is_left_to_hand_on(ending: tuple[int, ...]) -> None:
    """Those that end with their first token have nothing to hand on; the others need the prompt's blocks."""
    firsts = [run_alone(prompt(9), replace(params(i), max_tokens=1))[0] for i in range(3)]
    assert len(set(firsts)) == 3, "the test needs other seeds"
    stops = frozenset(firsts[i] for i in ending)
    engine = fake_engine()
    sequence = forked("r", prompt(9), 3, replace(DRAWN, stop_token_ids=stops), hold_after_prefill=True)
    engine.add(sequence)
    told = [output for step in iter(lambda: engine.step(), []) for output in step]
    first = [output for output in told if output.new_tokens]
    assert [list(output.new_tokens) for output in first] == [[first] for first in firsts]
    assert [output.finish_reason for output in first] == [
        FinishReason.STOP if i in ending else None for i in range(3)
    ]
    held = len(ending) < 3
    assert sequence.status is (SequenceStatus.HELD if held else SequenceStatus.FINISHED)
    assert [fork.output_ids for fork in sequence.forked] == ([[t] for t in firsts[1:]] if held else [])
    assert engine.stats().held == held
    engine.release(sequence)
    assert engine.stats().blocks.held == 0


def test_a_step_that_fails_leaves_every_block_as_it_was() -> None:
    model = HookedModel()
    engine = fake_engine(model=model)
    engine.add(forked("r", prompt(9), 3))
    told: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            if output.new_tokens:
                told.setdefault(output.seq.request_id, []).extend(output.new_tokens)

    while not told:
        step()

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    model.hook = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        step()
    assert engine.stats().scheduler.copied_blocks == 0
    while engine.has_work:
        step()
    assert told == alone("r", prompt(9), 3)
    assert engine.stats().blocks.held == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_takes_the_place_of_what_the_host_tier_saved(fails: bool) -> None:
    """First the tier's copies, then those of the step. Those of the tier stay if the step fails."""
    model = HookedModel()
    engine = fake_engine(8, host_blocks=20, model=model)
    old = Sequence("old", 1, prompt(24, 9), replace(DRAWN, max_tokens=1))
    [first] = run(engine, old)
    engine.add(forked("r", prompt(5), 3))
    told: dict[str, list[int]] = {}
    while engine.has_work:
        before = engine.stats()
        if told and fails:
            model.hook = lambda: pytest.fail("broken on purpose")
            with pytest.raises(pytest.fail.Exception, match="on purpose"):
                engine.step()
            fails, model.hook = False, lambda: None
            assert engine.stats().scheduler.copied_blocks == 0
            assert engine.stats().host_tier.blocks.saved > before.host_tier.blocks.saved
        for output in engine.step():
            if output.new_tokens:
                told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
    assert told == alone("r", prompt(5), 3)
    assert engine.stats().scheduler.copied_blocks == 2
    assert engine.stats().host_tier.blocks.saved > 0
    again = Sequence("again", 1, prompt(24, 9), old.params)
    assert run(engine, again) == [first] == [run_alone(old.prompt_ids, old.params)]
    assert again.num_cached == 20
    assert engine.stats().host_tier.blocks.restored > 0


def test_a_fork_gives_its_seat_to_whom_is_more_urgent_and_keeps_its_blocks() -> None:
    engine = fake_engine(max_num_seqs=3, priority_aging=10.0)
    engine.add(forked("r", prompt(9), 3, priority=Priority(1)))
    while not engine.scheduler.running or engine.scheduler.running[0].num_outputs < 3:
        engine.step()
    blocks = engine.pool.allocate(2)
    assert blocks is not None
    filled = run_alone(prompt(5, 1), DRAWN)
    pool = runner_of(engine).pool
    pool[blocks] = 0.0
    for position, token in enumerate(prompt(5, 1)):
        written = pool[blocks[position // 4], :, :, :, position % 4]
        written[:, :, 0], written[:, :, 1] = token + 1.0, position + 1.0
    urgent = Sequence("urgent", 1, prompt(5, 1), DRAWN, [filled[0]])
    urgent.bind(blocks)
    engine.admit_computed(urgent)
    while engine.computing:  # nobody loses a seat while a step computes him
        engine.step()
    told = {seq.request_id: list(seq.output_ids) for seq in engine.scheduler.running}
    kept = [len(seq.block_ids) for seq in engine.scheduler.running if seq.request_id == "r-2"]
    engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == ["urgent", "r-0", "r-1"]
    [waits] = engine.scheduler.joining
    assert (waits.request_id, waits.output_ids, [len(waits.block_ids)]) == ("r-2", told["r-2"], kept)
    everybody = [*engine.scheduler.running, waits]
    while engine.has_work:
        engine.step()
    assert {seq.request_id: seq.output_ids for seq in everybody} == alone("r", prompt(9), 3) | {
        "urgent": filled
    }
    assert engine.stats().scheduler.preemptions == 0


def test_who_is_preempted_gets_no_copy() -> None:
    """Its blocks may be another's before the step begins."""
    engine = fake_engine(12, prefill_chunk=8)
    pool = engine.pool
    engine.add(Sequence("long", 1, prompt(40), DRAWN))
    engine.step()
    blocks = pool.allocate(2)
    assert blocks is not None
    answers = [Sequence(f"r-{i}", 1, prompt(5), params(i), output_ids=[i]) for i in range(3)]
    assert engine.admit_forked(answers, arrived(engine, blocks)) == {}
    stolen = pool.allocate(pool.num_allocatable - 2)
    assert stolen is not None
    with engine.lock:
        batch = engine.scheduler.schedule()
        kept = {copy.sequence for copy in batch.copies}
    assert engine.stats().scheduler.preemptions > 0
    assert kept <= {item.sequence for item in batch.items}
    taken = {copy.target for copy in batch.copies}
    free = [block for block in range(12) if pool.allocatable(block)]
    assert taken.isdisjoint(free)
    assert sum(map(pool.refs, range(12))) == sum(
        len(seq.block_ids) for seq in engine.scheduler.running
    ) + len(stolen) + len(batch.copies), "each copy keeps its source until the step is over"
