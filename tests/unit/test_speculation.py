"""Speculative decoding: whatever is drafted, the tokens are those of a run without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton import LLM, SamplingParams
from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine import verification
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.execution import StepResult
from baton.engine.sequence import FinishReason, Fork, Sequence
from baton.engine.step import StepTensors
from baton.engine.step_inputs import StepInputs
from baton.hub import resolve_model
from baton.models.loader import load_model
from baton.process.options import ModelError
from baton.router.dispatch.types import Request
from baton.speculation.draft_model import DraftModelDrafter
from baton.speculation.drafter import TokenSequence
from baton.speculation.ngram import NgramDrafter
from baton.speculation.speculator import MAX_PAUSE, PATIENCE
from baton.text.choice import TokenChunk
from baton_kernels.paged import PagedBatch
from tests.support.deep import all_deep_but
from tests.support.drafters import HostileDrafter, ScriptedDrafter
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine, run, run_alone
from tests.support.local_worker import LocalWorker, local_ring, until
from tests.support.runners import runner_of
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import TINY_MODELS

GREEDY = ResolvedSampling(max_tokens=40, temperature=0.0)
DRAWN = ResolvedSampling(max_tokens=40, seed=3, temperature=2.0, top_p=0.95)
RULED = replace(
    DRAWN,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((5, 3.0), (6, -2.0)),
    bad_word_ids=((9,), (5, 7), (1, 2, 3)),
    min_tokens=12,
    stop_token_ids=frozenset({5, 11, 40}),
)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + i * 17 + salt * 7 + 5) % VOCAB_SIZE for i in range(length)]


def scripted(*requests: tuple[list[int], ResolvedSampling], fault: int = 0) -> ScriptedDrafter:
    drafter = ScriptedDrafter(fault)
    for prompt_ids, params in requests:
        drafter.expect(prompt_ids, run_alone(prompt_ids, params))
    return drafter


def steps(engine: Engine, *sequences: Sequence) -> list[list[SequenceOutput]]:
    for seq in sequences:
        engine.add(seq)
    told = []
    while engine.has_work:
        told.append(engine.step())
    return told


class TestTokens:
    @pytest.mark.parametrize("params", [GREEDY, DRAWN, RULED], ids=["greedy", "drawn", "ruled"])
    @pytest.mark.parametrize("fault", all_deep_but(3, [0, 1, 2, 3, 7]))
    @pytest.mark.parametrize("num_drafts", all_deep_but(1, [1, 4, 16]))
    def test_they_are_those_of_a_run_without_drafts(
        self, params: ResolvedSampling, fault: int, num_drafts: int
    ) -> None:
        requests = [(prompt(5 + 6 * i, i), replace(params, seed=i)) for i in range(4)]
        engine = fake_engine(
            max_num_batched_tokens=64, drafter=scripted(*requests, fault=fault), num_drafts=num_drafts
        )
        outputs = run(engine, *(Sequence(f"{i}", 1, *request) for i, request in enumerate(requests)))
        assert outputs == [run_alone(*request) for request in requests]
        assert engine.stats().blocks.held == 0
        stats = engine.stats().speculation
        if fault == 0:
            assert stats.accepted_tokens == stats.drafted_tokens > 0
        if fault == 1:
            assert stats.accepted_tokens == 0 < stats.drafted_tokens

    @pytest.mark.parametrize("num_blocks", [13, 16, 24])
    @pytest.mark.parametrize("aging", [None, 3.0])
    def test_in_a_pool_too_small(self, num_blocks: int, aging: float | None) -> None:
        requests = [(prompt(4 + 5 * i, i % 2), replace(DRAWN, max_tokens=24, seed=i)) for i in range(5)]
        engine = fake_engine(
            num_blocks,
            max_num_batched_tokens=12,
            prefill_chunk=5,
            priority_aging=aging,
            drafter=scripted(*requests, fault=5),
        )
        priorities = [Priority(priority if aging else 0, 0.0) for priority in (0, -1, 2, 0, 5)]
        sequences = [
            Sequence(f"{i}", 1, *request, priority=priority)
            for i, (request, priority) in enumerate(zip(requests, priorities, strict=True))
        ]
        assert run(engine, *sequences) == [run_alone(*request) for request in requests]
        load = engine.stats()
        assert load.scheduler.preemptions > 0
        assert load.speculation.accepted_tokens > 0
        assert load.blocks.held == 0

    def test_several_tokens_are_told_as_one_output(self) -> None:
        request = (prompt(6), GREEDY)
        expected = run_alone(*request)
        engine = fake_engine(drafter=scripted(request), num_drafts=4)
        told = [output for step in steps(engine, Sequence("r", 1, *request)) for output in step]
        assert [len(output.new_tokens) for output in told] == [1] + [5] * 7 + [4]
        assert [token for output in told for token in output.new_tokens] == expected
        at = 6
        for output in told:
            assert output.first_new == at
            at += len(output.new_tokens)

    def test_forks_draft_from_their_second_token_on(self) -> None:
        params = [replace(DRAWN, seed=seed) for seed in (3, 4, 5)]
        ids = prompt(9)
        seq = Sequence("0", 1, ids, params[0], forks=tuple(Fork(f"{i}", params[i]) for i in (1, 2)))
        told: dict[str, list[int]] = {}
        engine = fake_engine(drafter=HostileDrafter(1, VOCAB_SIZE))
        for step in steps(engine, seq):
            for output in step:
                told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
        assert told == {f"{i}": run_alone(ids, one) for i, one in enumerate(params)}
        assert engine.stats().blocks.held == 0


class TestEnds:
    @pytest.mark.parametrize("at", [1, 2, 3, 5, 6, 11])
    def test_a_stop_token_among_the_accepted(self, at: int) -> None:
        ids = prompt(6)
        expected = run_alone(ids, GREEDY)
        first = expected.index(expected[at])
        params = replace(GREEDY, stop_token_ids=frozenset({expected[at]}))
        drafter = ScriptedDrafter()
        drafter.expect(ids, expected)  # also what would come behind the end
        seq = Sequence("r", 1, ids, params)
        assert run(fake_engine(drafter=drafter), seq) == [expected[: first + 1]]
        assert seq.finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7])
    def test_max_tokens(self, max_tokens: int) -> None:
        ids = prompt(6)
        drafter = ScriptedDrafter()
        drafter.expect(ids, run_alone(ids, GREEDY))
        seq = Sequence("r", 1, ids, replace(GREEDY, max_tokens=max_tokens))
        assert run(fake_engine(drafter=drafter), seq) == [run_alone(ids, GREEDY)[:max_tokens]]
        assert seq.finish_reason is FinishReason.LENGTH

    def test_the_context(self) -> None:
        ids = prompt(6)
        drafter = ScriptedDrafter()
        drafter.expect(ids, run_alone(ids, GREEDY))
        engine = fake_engine(max_model_len=17, drafter=drafter, num_drafts=16)
        places: list[int] = []
        runner = runner_of(engine)
        execute = runner.execute

        def watched(inputs: StepInputs) -> StepResult:
            places.append(int(StepTensors.of(inputs.layout, inputs.buffer).batch.positions.max()))
            return execute(inputs)

        runner.execute = watched  # type: ignore[method-assign]
        assert run(engine, Sequence("r", 1, ids, GREEDY)) == [run_alone(ids, GREEDY)[:11]]
        assert max(places) == 15  # nothing is computed behind the context


class TestLogprobs:
    def test_each_token_has_its_own(self) -> None:
        params = replace(RULED, logprobs=3)
        request = (prompt(6), params)

        def told(engine: Engine) -> list[tuple[float, int, tuple[int, ...], tuple[float, ...]]]:
            rows = []
            for step in steps(engine, Sequence("r", 1, *request)):
                for output in step:
                    assert output.details is not None
                    logprobs = output.details.logprobs
                    assert logprobs is not None
                    assert len(logprobs) == len(output.new_tokens)
                    for at in range(len(logprobs)):
                        one = logprobs[at : at + 1]
                        rows.append((one.chosen[0], one.ranks[0], tuple(one.top_ids), tuple(one.top)))
            return rows

        assert told(fake_engine(drafter=scripted(request, fault=4))) == told(fake_engine())


class TestRoom:
    def test_drafts_take_what_is_left_of_the_budget(self) -> None:
        requests = [(prompt(5, i), replace(GREEDY, max_tokens=30)) for i in range(3)]
        engine = fake_engine(max_num_seqs=3, max_num_batched_tokens=7, drafter=scripted(*requests))
        sizes = []
        run_step = engine.runner.run

        def watched(batch):  # type: ignore[no-untyped-def]
            sizes.append(sum(item.num_new for item in batch.items))
            return run_step(batch)

        engine.runner.run = watched  # type: ignore[method-assign]
        outputs = run(engine, *(Sequence(f"{i}", 1, *request) for i, request in enumerate(requests)))
        assert outputs == [run_alone(*request) for request in requests]
        assert max(sizes) == 7
        assert engine.stats().speculation.accepted_tokens > 0

    @pytest.mark.parametrize("promised", [True, False])
    def test_drafts_take_no_block_that_is_promised(self, promised: bool) -> None:
        request = (prompt(6), replace(GREEDY, max_tokens=20))
        engine = fake_engine(8, drafter=scripted(request), num_drafts=16)
        seq = Sequence("r", 1, *request)
        engine.add(seq)
        engine.step()
        if promised:
            assert engine.reserve(20)
        bound = []
        run_step = engine.runner.run

        def watched(batch):  # type: ignore[no-untyped-def]
            bound.append(len(seq.block_ids) - -(-seq.num_tokens // 4))
            return run_step(batch)

        engine.runner.run = watched  # type: ignore[method-assign]
        assert run(engine) == []
        assert seq.output_ids == run_alone(*request)
        assert (max(bound) == 0) == promised
        assert engine.stats().speculation.accepted_tokens > 0

    def test_nobody_waits_for_blocks_that_drafts_hold(self) -> None:
        """Between steps a sequence holds as many blocks as it would without drafts."""
        request = (prompt(6), GREEDY)
        engine = fake_engine(drafter=scripted(request, fault=3), num_drafts=16)
        seq = Sequence("r", 1, *request)
        engine.add(seq)
        while engine.has_work:
            engine.step()
            assert len(seq.block_ids) in (0, -(-seq.num_computed // 4))

    def test_what_is_refused_is_not_found_by_others(self) -> None:
        """Full blocks enter the prefix index as far as they were accepted."""
        request = (prompt(6), GREEDY)
        engine = fake_engine(drafter=scripted(request, fault=2), num_drafts=16)
        [outputs] = run(engine, Sequence("r", 1, *request))
        follow_up = prompt(6) + outputs + [1]
        expected = run_alone(follow_up, GREEDY)
        again = Sequence("s", 1, follow_up, GREEDY)
        assert run(engine, again) == [expected]
        assert again.num_cached == (len(follow_up) - 2) // 4 * 4


class MarkovModel:
    """The next token's distribution hangs on the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        """``logits`` [V, V]: a row for each last token."""
        self.table = logits

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        return (token_ids if batch.wanted is None else token_ids[batch.wanted.rows])[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0]].clone()


class PlausibleDrafter:
    """Draws its drafts from a distribution that is like the target's, and wrong."""

    wants_hidden = False

    def __init__(self, probabilities: Tensor) -> None:
        self._probabilities = probabilities
        self._generator = torch.Generator().manual_seed(7)

    def draft(self, sequences: Ids[TokenSequence], limits: Ids[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        last = torch.tensor([seq.token_ids[-1] for seq in sequences])
        for place in range(max(limits)):
            last = torch.multinomial(self._probabilities[last], 1, generator=self._generator)[:, 0]
            for draft, limit, token in zip(drafts, limits, last.tolist(), strict=True):
                draft += [token] if place < limit else []
        return drafts

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None: ...

    def forget(self, sequence: TokenSequence) -> None: ...


class TestDistribution:
    """The oracle is Pearson's chi-square test of more than 20,000 transitions. Seeds are fixed, so it always
    says the same."""

    VOCAB = 8

    def p_value(self) -> float:
        """Of the transitions of a run with drafts, under the target's distribution."""
        table = torch.randn(self.VOCAB, self.VOCAB, generator=torch.Generator().manual_seed(1))
        target = table.softmax(dim=-1)
        drafter = PlausibleDrafter((0.7 * table + 0.1).softmax(dim=-1))
        engine = fake_engine(
            256,
            16,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            model=MarkovModel(table),
            vocab_size=self.VOCAB,
            drafter=drafter,
            prefix_caching=False,
        )
        sequences = [
            Sequence(f"{i}", 1, [i % self.VOCAB], ResolvedSampling(max_tokens=101, seed=i))
            for i in range(208)
        ]
        run(engine, *sequences)
        stats = engine.stats().speculation
        assert stats.accepted_tokens > stats.drafted_tokens / 20
        counts = torch.zeros(self.VOCAB, self.VOCAB, dtype=torch.float64)
        for seq in sequences:
            pairs = torch.tensor(seq.token_ids).unfold(0, 2, 1)
            counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs)).double(), accumulate=True)
        assert counts.sum() > 20_000
        expected = counts.sum(dim=1, keepdim=True) * target
        statistic = ((counts - expected) ** 2 / expected).sum()
        freedom = torch.tensor(self.VOCAB * (self.VOCAB - 1.0), dtype=torch.float64)
        return float(torch.special.gammaincc(freedom / 2, statistic / 2))

    def test_it_is_the_targets(self) -> None:
        assert self.p_value() > 0.01

    def test_the_test_finds_a_verification_that_accepts_everything(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def accept_all(chosen: Ids[int], drafts: Ids[int], usable: int) -> int:
            return len(drafts) + 1

        monkeypatch.setattr(verification, "_accepted", accept_all)
        assert self.p_value() < 1e-6


class TestManners:
    def test_a_sequence_whose_drafts_are_refused_is_left_in_peace(self) -> None:
        request = (prompt(6), replace(GREEDY, max_tokens=200))
        engine = fake_engine(drafter=scripted(request, fault=1))
        run(engine, Sequence("r", 1, *request))
        stats = engine.stats().speculation
        pauses = [2**n for n in range(20)]
        most = PATIENCE + sum(1 for n in range(20) if sum(min(p, MAX_PAUSE) + 1 for p in pauses[:n]) < 200)
        assert PATIENCE < stats.verifications <= most

    def test_the_drafter_forgets_who_is_over(self) -> None:
        drafter = HostileDrafter(2, VOCAB_SIZE, wants_hidden=True)
        engine = fake_engine(drafter=drafter)
        for name in "abcd":
            engine.add(Sequence(name, 1, prompt(7), GREEDY))
        for _ in range(3):
            engine.step()
        assert len(drafter.alive) == 4
        engine.cancel("b", 1)
        engine.step()
        assert len(drafter.alive) == 3
        run(engine)
        run(engine, Sequence("e", 1, prompt(3), replace(GREEDY, max_tokens=2)))
        assert {seq.request_id for seq in drafter.alive} <= {"e"}  # type: ignore[attr-defined]


class TestNgram:
    @pytest.mark.parametrize(
        ("tokens", "limit", "expected"),
        [
            ([1, 2, 3, 4, 9, 2, 3], 2, [4, 9]),
            ([1, 2, 3, 4, 9, 2, 3], 3, [4, 9, 2]),
            ([2, 3, 7, 2, 3, 8, 2, 3], 1, [8]),  # the latest
            ([5, 2, 3, 7, 2, 3, 8, 5, 2, 3], 1, [7]),  # but a longer run first
            ([1, 2, 3], 4, []),
            ([9, 3, 1, 3], 4, []),  # a single token is below the least
            ([3], 4, []),
            ([7, 7, 7], 5, [7] * 5),
            ([1, 4, 5, 4, 5], 5, [4, 5, 4, 5, 4]),
        ],
    )
    def test_what_followed_last_time(self, tokens: list[int], limit: int, expected: list[int]) -> None:
        seq = Sequence("r", 1, tokens, GREEDY)
        assert NgramDrafter(2, 3).draft([seq], [limit]) == [expected]
        seq.append(1)  # nothing holds on to its tokens

    def test_greedy_loops_are_drafted(self) -> None:
        """Greedy outputs of a model without sense repeat themselves at length."""
        ids = [3, 1, 4] * 6
        engine = fake_engine(drafter=NgramDrafter(1, 3))
        assert run(engine, Sequence("r", 1, ids, GREEDY)) == [run_alone(ids, GREEDY)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: TINY_MODELS[name](root / name) for name in ("llama", "qwen3", "mistral")}


class TestRealModels:
    """Small random models in float32. The draft is of another family and another seed."""

    REQUESTS = (
        (([3, 1, 4, 1, 5] * 9), GREEDY),
        (list(range(40, 90)), replace(GREEDY, repetition_penalty=1.2, logprobs=2)),
        ([7], DRAWN),
        (list(range(200, 217)), replace(DRAWN, temperature=0.7, seed=9, logprobs=0, frequency_penalty=0.5)),
    )

    def answers(self, path: Path, **options: object) -> tuple[list[list[int]], list[float], Engine]:
        """Tokens and log-probabilities of all requests, in chunks and in a pool too small."""
        engine = Engine.from_config(
            EngineConfig(
                path,
                num_blocks=14,
                max_num_batched_tokens=48,
                max_num_seqs=4,
                prefill_chunk=16,
                **options,  # type: ignore[arg-type]
            )
        )
        seqs = [Sequence(f"{i}", 1, ids, params) for i, (ids, params) in enumerate(self.REQUESTS)]
        told: dict[Sequence, list[float]] = {seq: [] for seq in seqs}
        for step in steps(engine, *seqs):
            for output in step:
                if output.details is not None and output.details.logprobs is not None:
                    logprobs = output.details.logprobs
                    for at, chosen in enumerate(logprobs.chosen):
                        told[output.seq] += [chosen, *(top for _, top in logprobs.top_of(at, 2))]
        return (
            [seq.output_ids for seq in seqs],
            [value for values in told.values() for value in values],
            engine,
        )

    @pytest.mark.parametrize("name", ["llama", "qwen3"])
    @pytest.mark.parametrize("method", ["ngram", "draft", "itself"])
    def test_tokens_and_logprobs_stay(self, models: dict[str, Path], name: str, method: str) -> None:
        tokens, logprobs, plain = self.answers(models[name])
        options: dict[str, object] = {"speculative_method": "ngram", "speculative_ngram_min": 1}
        if method != "ngram":
            draft = models["mistral" if method == "draft" else name]
            options = {"speculative_method": "draft", "speculative_model": str(draft)}
        same, told, engine = self.answers(models[name], **options)
        assert same == tokens
        assert told == pytest.approx(logprobs, abs=1e-4)
        stats = engine.stats().speculation
        assert stats.verifications > 0
        assert plain.stats().scheduler.preemptions > 0
        assert engine.stats().blocks.held == 0
        if method == "itself":
            assert stats.accepted_tokens > stats.drafted_tokens / 3
        if method != "ngram":
            assert engine.speculator is not None
            drafter = engine.speculator.drafter
            assert isinstance(drafter, DraftModelDrafter)
            engine.speculator.forget_ended()
            assert drafter.num_free == 14

    def test_a_model_drafts_for_itself_without_a_fault(self, models: dict[str, Path]) -> None:
        """Its cache is right in every place: otherwise some draft of a greedy request would be refused."""
        options = {"speculative_method": "draft", "speculative_model": str(models["llama"])}
        engine = Engine.from_config(
            EngineConfig(models["llama"], num_blocks=64, prefill_chunk=16, **options)  # type: ignore[arg-type]
        )
        seqs = [Sequence(f"{i}", 1, list(range(i + 1, 9 * i + 4)), GREEDY) for i in range(4)]
        run(engine, *seqs)
        stats = engine.stats().speculation
        assert stats.accepted_tokens == stats.drafted_tokens > 4 * 20

    @pytest.mark.parametrize("accepted", [0, 1, 3, 4])
    def test_what_was_refused_leaves_no_trace_in_its_cache(
        self, models: dict[str, Path], accepted: int
    ) -> None:
        shape = load_model(models["llama"])
        model = FakeModel(shape.config.vocab_size)  # its drafts hang on every K and V in sight
        model.config, model.dtype = shape.config, torch.float32  # type: ignore[attr-defined]

        def drafter(num_blocks: int = 20, budget: int = 64) -> DraftModelDrafter:
            cpu = torch.device("cpu")
            return DraftModelDrafter(model, num_blocks, 4, cpu, budget)  # type: ignore[arg-type]

        seen, seq = drafter(), Sequence("r", 1, list(range(30, 50)), GREEDY)
        for _ in range(3):
            [drafts] = seen.draft([seq], [4])
            assert [drafts] == drafter().draft([seq], [4])
            assert len(drafts) == 4
            for token in (*drafts[:accepted], 7, 8, 9):  # and then it paused
                seq.append(token)
        # It reads what it has not seen in pieces, and without room it drafts nothing.
        slow = drafter(budget=8)
        tries = [slow.draft([seq], [4])[0] for _ in range(-(-seq.num_tokens // 8))]
        assert tries[:-1] == [[]] * (len(tries) - 1)
        assert [tries[-1]] == drafter().draft([seq], [4])
        assert drafter(num_blocks=3).draft([seq], [4]) == [[]]

    def test_what_a_draft_model_must_be(self, models: dict[str, Path], tmp_path: Path) -> None:
        def start(path: Path) -> None:
            options = {"speculative_method": "draft", "speculative_model": str(path)}
            Engine.from_config(EngineConfig(models["llama"], num_blocks=8, **options))  # type: ignore[arg-type]

        with pytest.raises(
            ModelError, match=r"speculative_model .*: its tokenizer is not that of .*token \d+ is"
        ):
            start(resolve_model("demo"))
        with pytest.raises(ModelError, match="no such directory"):
            start(tmp_path / "nothing")
        with pytest.raises(ModelError, match="speculative_model"):
            start(tmp_path)

    @pytest.mark.parametrize(
        ("recipe", "kept"),
        [
            (LATENTS["deepseek-v3"], r"DeepseekV3ForCausalLM keeps latents in layer 0"),
            (MAMBAS["lfm2"], r"Lfm2ForCausalLM keeps a state in layer \d"),
            (MAMBAS["falcon-h1"], r"FalconH1ForCausalLM keeps .* and .* in layer 0"),
        ],
    )
    def test_one_that_keeps_anything_else_is_refused(
        self, recipe: Callable[[Path], Path], kept: str, models: dict[str, Path], tmp_path: Path
    ) -> None:
        """Its layers would take the drafter's K and V for what they keep, and write elsewhere."""
        options = {"speculative_method": "draft", "speculative_model": str(recipe(tmp_path / "draft"))}
        with pytest.raises(ModelError, match=rf"speculative_model .*: {kept}; allowed: a model that keeps K"):
            Engine.from_config(EngineConfig(models["llama"], num_blocks=8, **options))  # type: ignore[arg-type]

    def test_its_kv_counts(self, models: dict[str, Path]) -> None:
        plain = Engine.from_config(EngineConfig(models["llama"], kv_cache_bytes=1 << 20))
        options = {"speculative_method": "draft", "speculative_model": str(models["llama"])}
        engine = Engine.from_config(
            EngineConfig(models["llama"], kv_cache_bytes=1 << 20, **options)  # type: ignore[arg-type]
        )
        assert engine.pool.num_blocks == plain.pool.num_blocks // 2


class TestAroundTheEngine:
    @pytest.mark.parametrize("fault", [0, 3])
    async def test_through_a_ring(self, fault: int) -> None:
        """Several tokens travel in one delta, of several answers to a prompt as well, and none is lost."""
        params = [replace(DRAWN, seed=seed, ignore_eos=True) for seed in (3, 4, 5)]
        ids = prompt(10)
        expected = [run_alone(ids, one) for one in params]
        drafter = ScriptedDrafter(fault)
        drafter.expect(ids, expected[1])  # the others get some that are right by chance
        prefill = LocalWorker("prefill")
        decode = LocalWorker("decode", make_engine=partial(fake_engine, drafter=drafter))
        async with local_ring([prefill, decode]) as ring:
            with ring.generate(ids, [Request(f"r{i}", one) for i, one in enumerate(params)]) as chunks:
                told = await asyncio.gather(*(tokens_of(one) for one in chunks))
            assert [[token for tokens in one for token in tokens] for one in told] == expected
            assert max(len(tokens) for tokens in told[1]) > 2
            assert decode.engine.stats().speculation.accepted_tokens > 0
            assert decode.service.stats().engine.speculation == decode.engine.stats().speculation
            await until(lambda: not (prefill.held or decode.held))

    async def test_a_client_that_leaves(self) -> None:
        ids = prompt(10)
        params = replace(GREEDY, max_tokens=200)
        drafter = scripted((ids, params))
        decode = LocalWorker("decode", step_s=0.01, make_engine=partial(fake_engine, drafter=drafter))
        async with local_ring([LocalWorker("prefill"), decode]) as ring:
            with ring.generate(ids, [Request("r", params)]) as [chunks]:
                tokens: list[int] = []
                async for chunk in chunks:
                    tokens += chunk.token_ids
                    if len(tokens) > 10:
                        break
                await chunks.aclose()
            await until(lambda: not decode.held)
            assert tokens == run_alone(ids, params)[: len(tokens)]
            assert decode.engine.generated_tokens < 150

    @pytest.mark.deep
    def test_offline(self) -> None:
        plain, drafting = LLM("demo"), LLM("demo", speculative_method="ngram", num_speculative_tokens=8)
        asked = "What is a KV cache?"
        greedy = SamplingParams(temperature=0.0, max_tokens=64)
        answer = plain.chat([{"role": "user", "content": asked}], greedy, progress=False)[0].outputs[0].text
        chat = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": asked},
        ]
        for params in (
            SamplingParams(temperature=0.0, max_tokens=64, logprobs=1),
            SamplingParams(temperature=0.9, seed=5, max_tokens=40, n=3),
            SamplingParams(temperature=0.0, stop=["keys and", "layer"], max_tokens=64),
            SamplingParams(temperature=0.0, min_tokens=30, stop=["layer"], max_tokens=64),
        ):
            [expected], [got] = (llm.chat(chat, params, progress=False) for llm in (plain, drafting))
            assert [replace(one, logprobs=None) for one in got.outputs] == [
                replace(one, logprobs=None) for one in expected.outputs
            ]
            for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
                if theirs.logprobs is not None:
                    assert ours.logprobs is not None
                    assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)
        stats = drafting.engine.stats().speculation
        assert stats.accepted_tokens / stats.verifications + 1 > 1.8


async def tokens_of(chunks: AsyncIterator[TokenChunk]) -> list[tuple[int, ...]]:
    return [chunk.token_ids async for chunk in chunks]
