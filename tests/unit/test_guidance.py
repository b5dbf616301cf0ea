"""A guided sequence takes the likeliest token that its grammar allows, wherever it goes on."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput, choice_text
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.sampling.guidance import NOTHING_LEFT, GuidedRow, StepMasks
from baton.engine.sequence import FinishReason, Sequence, SequenceStatus
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.table import Grammar, TokenTable
from baton.speculation.drafter import Drafter
from baton.text.tokenizer import Tokenizer
from tests.support.deep import all_deep_but
from tests.support.drafters import HostileDrafter, ScriptedDrafter
from tests.support.fake_engine import fake_engine
from tests.support.runners import runner_of
from tests.support.tiny_models import BOS, EOS, IM_END, VOCAB_SIZE, save_byte_tokenizer

pytestmark = pytest.mark.usefixtures("launched")

ENDS = frozenset({EOS, IM_END})
PROMPT = [7, 8, 9, 10, 11]
WORDS = ["sun", "sunflower", "moon", "sunday", "m"]
CHOICE = StructuredOutput("choice", choice_text(WORDS))
LETTERS = StructuredOutput("regex", "[a-z]{4,30}")
JSON = StructuredOutput(
    "json_schema",
    json.dumps(
        {
            "x-guidance": {"whitespace_flexible": False},
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
            },
            "required": ["name", "tags"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def grammars(launched: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    """Over tokens that are bytes. Made again for each way to launch steps, so that nothing is known yet."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer.from_dir(path)
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, sorted(ENDS)))
    yield compiler
    compiler.close()


def engine_of(
    grammars: GrammarCompiler | None, num_blocks: int = 64, drafter: Drafter | None = None
) -> Engine:
    return fake_engine(
        num_blocks, eos_token_ids=ENDS, vocab_size=VOCAB_SIZE, grammars=grammars, drafter=drafter
    )


def guided(output: StructuredOutput | None, name: str = "r", *given: int, **fields: object) -> Sequence:
    """A request for it, greedy unless ``fields`` say otherwise, that goes on from the outputs ``given``."""
    settings: dict[str, object] = {"max_tokens": 60, "temperature": 0.0, **fields}
    params = ResolvedSampling(structured_output=output, **settings)  # type: ignore[arg-type]
    prompt = [*PROMPT, *name.encode()]
    return Sequence(name, 1, prompt, params, output_ids=list(given))


def run(engine: Engine, *sequences: Sequence) -> list[SequenceOutput]:
    """All that the steps return until nothing is left to do."""
    for seq in sequences:
        engine.add(seq)
    outputs: list[SequenceOutput] = []
    for _ in range(3000):
        if not engine.has_work:
            return outputs
        engine.work.clear()
        step = engine.step()
        outputs += step
        if not step:
            engine.work.wait(0.02)
    raise AssertionError(f"still at work: {engine.stats()}")


def alone(grammars: GrammarCompiler, seq: Sequence) -> list[int]:
    copy = Sequence("alone", 1, seq.prompt_ids, seq.params)
    run(engine_of(grammars, 256), copy)
    return copy.output_ids


def text_of(seq: Sequence) -> str:
    return bytes(token for token in seq.output_ids if token < 256).decode("utf-8", "replace")


# --- the choice of each token


def test_each_token_is_the_likeliest_that_the_choices_allow(grammars: GrammarCompiler) -> None:
    seq = guided(CHOICE, logprobs=VOCAB_SIZE)
    outputs = run(engine_of(grammars), seq)
    assert seq.finish_reason is FinishReason.STOP
    assert text_of(seq) in WORDS
    said = b""
    for output in outputs:
        if not output.new_tokens:
            continue
        assert output.details is not None
        assert output.details.logprobs is not None
        told = output.details.logprobs
        raw = dict(zip(told.top_ids, told.top, strict=True))
        follows = {
            word.encode()[len(said)]
            for word in WORDS
            if word.encode().startswith(said) and word.encode() != said
        }
        allowed = follows | (ENDS if said.decode() in WORDS else set())
        best = max(raw[token] for token in allowed)
        assert raw[output.new_tokens[0]] == best
        assert output.new_tokens[0] in allowed
        said += bytes([output.new_tokens[0]]) if output.new_tokens[0] < 256 else b""


def test_apply_bars_what_has_no_bit() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (2, 11), dtype=np.int32)  # 352 bits for 320 logits
    logits = torch.randn(4, VOCAB_SIZE)
    before = logits.clone()
    rows = [GuidedRow(at, None, ()) for at in (2, 0)]  # type: ignore[arg-type]
    StepMasks(rows, words).apply(logits)
    for row, at in enumerate((2, 0)):
        for token in range(VOCAB_SIZE):
            allowed = int(words[row, token // 32]) >> token % 32 & 1
            assert logits[at, token] == (before[at, token] if allowed else -torch.inf)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_rows_without_a_grammar_cost_nothing() -> None:
    stage = runner_of(engine_of(None)).masks
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    stage.masks([]).apply(logits)
    assert torch.equal(logits, before)
    assert stage.stats.steps == 0


# --- the end


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}, {"min_tokens": 9, "seed": 3}])
def test_a_complete_grammar_ends_it_whatever_else_is_asked(
    grammars: GrammarCompiler, fields: dict[str, object]
) -> None:
    seq = guided(CHOICE, "r", **fields)
    run(engine_of(grammars), seq)
    assert (seq.finish_reason, text_of(seq) in WORDS) == (FinishReason.STOP, True)
    assert seq.output_ids[-1] in ENDS


def test_min_tokens_holds_where_the_grammar_can_go_on(grammars: GrammarCompiler) -> None:
    biased = ((EOS, 100.0), (IM_END, 50.0))
    for least, length in ((0, 4), (12, 12)):
        seq = guided(LETTERS, min_tokens=least, logit_bias=biased)
        run(engine_of(grammars), seq)
        assert len(text_of(seq)) == length
        assert seq.output_ids[-1] == EOS


def test_a_stop_token_ends_it_only_where_the_grammar_may_end(grammars: GrammarCompiler) -> None:
    seq = guided(LETTERS, stop_token_ids=frozenset({BOS}), logit_bias=((BOS, 100.0), (EOS, -100.0)))
    run(engine_of(grammars), seq)
    assert (len(text_of(seq)), seq.output_ids[-1], seq.finish_reason) == (4, BOS, FinishReason.STOP)


# --- the same tokens wherever it goes on


@pytest.mark.parametrize("output", [JSON, CHOICE, LETTERS], ids=["json", "choice", "regex"])
@pytest.mark.parametrize("temperature", all_deep_but(1, [0.0, 1.0]))
def test_it_goes_on_from_any_of_its_tokens(
    grammars: GrammarCompiler, output: StructuredOutput, temperature: float
) -> None:
    whole = guided(output, temperature=temperature, seed=11)
    run(engine_of(grammars), whole)
    assert whole.finish_reason is FinishReason.STOP
    for cut in range(1, whole.num_outputs):
        resumed = guided(output, "r", *whole.output_ids[:cut], temperature=temperature, seed=11)
        run(engine_of(grammars), resumed)
        assert resumed.output_ids == whole.output_ids


def test_preemption_changes_no_token(grammars: GrammarCompiler) -> None:
    rng = random.Random(2)
    forms = (JSON, CHOICE, LETTERS, None)
    sequences = [
        guided(
            rng.choice(forms),
            f"{i}",
            seed=i,
            temperature=rng.choice((0.0, 1.0)),
            min_tokens=rng.choice((0, 9)),
        )
        for i in range(16)
    ]
    engine = engine_of(grammars, 24)
    run(engine, *sequences)
    assert engine.stats().scheduler.preemptions > 0
    assert engine.stats().blocks.held == 0
    assert [seq.output_ids for seq in sequences] == [alone(grammars, seq) for seq in sequences]
    followed = sum(s.num_outputs for s in sequences if s.guide is not None)
    assert runner_of(engine).masks.stats.masks >= followed


def test_prefill_samples_the_first_token_and_decode_the_rest(grammars: GrammarCompiler) -> None:
    whole = alone(grammars, guided(JSON))
    first = guided(JSON)
    first.hold_after_prefill = True
    prefill, decode = engine_of(grammars), engine_of(grammars)
    run(prefill, first)
    assert first.status is SequenceStatus.HELD
    second = guided(JSON, "r", *first.output_ids)
    with decode.lock:
        second.bind(decode.pool.allocate(-(-(second.num_tokens - 1) // 4)) or ())
        runner_of(decode).pool[second.block_ids] = runner_of(prefill).pool[first.block_ids]
    decode.admit_computed(second)
    run(decode)
    assert second.output_ids == whole


# --- with drafts


@pytest.mark.parametrize("fault", [0, 2, 5])
def test_drafts_change_no_token(grammars: GrammarCompiler, fault: int) -> None:
    drafter = ScriptedDrafter(fault)
    sequences = [
        guided(output, f"{number}-{i}", temperature=temperature, seed=i, **fields)
        for number, output in enumerate((JSON, CHOICE, LETTERS))
        for i, temperature in enumerate((0.0, 1.0))
        for fields in ({"min_tokens": 9, "stop_token_ids": frozenset({BOS})},)
    ]
    expected = [alone(grammars, seq) for seq in sequences]
    for seq, outputs in zip(sequences, expected, strict=True):
        drafter.expect(seq.prompt_ids, [*outputs, 100, 100, 100])
    engine = engine_of(grammars, drafter=drafter)
    run(engine, *sequences)
    assert [seq.output_ids for seq in sequences] == expected
    stats = engine.stats().speculation
    assert stats.accepted_tokens > 30
    if fault == 0:
        assert stats.accepted_tokens >= stats.drafted_tokens - 3 * len(sequences)


def test_drafts_that_the_grammar_refuses_change_no_token(grammars: GrammarCompiler) -> None:
    sequences = [guided(output, f"{i}", temperature=1.0) for i, output in enumerate((JSON, CHOICE, LETTERS))]
    expected = [alone(grammars, seq) for seq in sequences]
    run(engine_of(grammars, drafter=HostileDrafter(5, VOCAB_SIZE)), *sequences)
    assert [seq.output_ids for seq in sequences] == expected


def test_what_fails_behind_a_draft_fails_there(grammars: GrammarCompiler) -> None:
    form = StructuredOutput("choice", choice_text(["abcdef"]))
    for bad_words in (((*b"cd",),), ((*b"ab",),), ((*b"ef",),)):
        seq = guided(form, bad_word_ids=bad_words)
        drafter = ScriptedDrafter()
        drafter.expect(seq.prompt_ids, list(b"abcdef"))
        outputs = run(engine_of(grammars, drafter=drafter), seq)
        assert [output.error for output in outputs][-1] == NOTHING_LEFT
        assert bytes(seq.output_ids) == b"abcdef"[: b"abcdef".index(bad_words[0][1])]


# --- what goes wrong ends one request only


def test_rules_that_leave_nothing_end_the_request_and_hurt_no_other(grammars: GrammarCompiler) -> None:
    sequences = [
        guided(LETTERS, "a", temperature=1.0, seed=1),
        guided(LETTERS, "b", allowed_token_ids=(1, 2, 3)),
        guided(None, "c", temperature=1.0, seed=2),
        guided(CHOICE, "d", bad_word_ids=tuple((byte,) for byte in b"sm"), temperature=1.0, top_k=5, seed=4),
    ]
    outputs = run(engine_of(grammars), *sequences)
    errors = {output.seq.request_id: output.error for output in outputs if output.error is not None}
    assert errors == {"b": NOTHING_LEFT, "d": NOTHING_LEFT}
    for seq in (sequences[1], sequences[3]):
        assert (seq.finish_reason, seq.output_ids) == (FinishReason.ERROR, [])
    for seq in (sequences[0], sequences[2]):
        assert seq.output_ids == alone(grammars, seq)


def test_outputs_that_do_not_follow_the_grammar_are_refused(grammars: GrammarCompiler) -> None:
    seq, other = guided(LETTERS, "a", ord("1")), guided(LETTERS, "b")
    [failure] = [output for output in run(engine_of(grammars), seq, other) if output.error is not None]
    assert failure.seq is seq
    assert failure.error is not None
    assert failure.error.startswith("structured output: ")
    assert other.output_ids == alone(grammars, other)


def test_a_refused_grammar_ends_the_request(grammars: GrammarCompiler) -> None:
    engine = engine_of(grammars)
    seq, other = guided(StructuredOutput("regex", "(a"), "a"), guided(None, "b")
    outputs = run(engine, seq, other)
    assert "unclosed group" in str(next(output.error for output in outputs if output.seq is seq))
    assert other.finish_reason is FinishReason.LENGTH
    with pytest.raises(GrammarError, match="unclosed group"):  # known by now
        engine.add(guided(StructuredOutput("regex", "(a"), "c"))
    with pytest.raises(GrammarError, match="unclosed group"):
        engine.check(guided(StructuredOutput("regex", "(a"), "c"))
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_without_an_end_or_a_tokenizer_there_is_no_guidance(grammars: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        fake_engine(vocab_size=VOCAB_SIZE, grammars=grammars).check(guided(LETTERS))
    with pytest.raises(ValueError, match="cannot guide"):
        engine_of(None).add(guided(LETTERS))


# --- for whom a grammar is compiled


def test_each_tenant_has_its_grammars_compiled(grammars: GrammarCompiler) -> None:
    engine = engine_of(grammars)
    form = StructuredOutput("regex", "[ab]{3,9}")
    before = grammars.stats()
    for number, salt in enumerate((b"a" * 16 + b"1" * 16, b"a" * 16 + b"2" * 16, b"b" * 16 + b"1" * 16)):
        seq = guided(form, f"{number}")
        seq.cache_salt = salt
        run(engine, seq)
        assert re.fullmatch("[ab]{3,9}", bytes(seq.output_ids[:-1]).decode())
    assert grammars.stats().compiled - before.compiled == 2, "once for the groups of a tenant"


# --- while a grammar is being compiled


class Slow(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        super().__init__(lambda: pytest.fail("not used"))
        self.grammar: Future[Grammar] = Future()
        self._grammars = grammars

    def compile(self, output: StructuredOutput, tenant: str = "") -> Future[Grammar]:
        return self.grammar

    def finish(self) -> None:
        self.grammar.set_result(self._grammars.compile(LETTERS).result(30))


def test_others_go_on_while_a_grammar_is_compiled(grammars: GrammarCompiler) -> None:
    slow = Slow(grammars)
    engine = engine_of(slow)
    seq, other = guided(LETTERS, "a"), guided(None, "b", max_tokens=5)
    engine.add(seq)
    engine.add(other)
    while other.status is not SequenceStatus.FINISHED:
        engine.step()
    assert (seq.num_outputs, engine.stats().waiting, engine.has_work, engine.step()) == (0, 1, True, [])
    slow.finish()
    run(engine)
    assert seq.output_ids == alone(grammars, seq)


def test_cancelled_or_replaced_while_its_grammar_is_compiled(grammars: GrammarCompiler) -> None:
    slow = Slow(grammars)
    engine = engine_of(slow)
    cancelled, replaced = guided(LETTERS, "a"), guided(LETTERS, "b")
    newer = Sequence("b", 2, replaced.prompt_ids, replaced.params)
    for seq in (cancelled, replaced, newer):
        engine.add(seq)
    assert engine.cancel("a", 1)
    slow.finish()
    run(engine)
    assert [s.finish_reason for s in (cancelled, replaced)] == [FinishReason.CANCELLED] * 2
    assert newer.output_ids == alone(grammars, newer)


@pytest.mark.parametrize("ending", ["cancelled", "refused", "busy"])
def test_blocks_that_came_by_handoff_are_freed(grammars: GrammarCompiler, ending: str) -> None:
    slow = Slow(grammars)
    engine = engine_of(slow)
    seq = guided(LETTERS, "a", ord("x"))
    with engine.lock:
        seq.bind(engine.pool.allocate(-(-(seq.num_tokens - 1) // 4)) or ())
    engine.admit_computed(seq)
    assert (engine.stats().blocks.held, engine.stats().waiting) == (2, 1)
    if ending == "cancelled":
        engine.cancel("a", 1)
    else:
        slow.grammar.set_exception(GrammarError("no") if ending == "refused" else GrammarBusyError("no"))
        [output] = engine.step()
        assert (output.error, output.finish_reason) == ("structured output: no", FinishReason.ERROR)
        assert output.blameless == (ending == "busy")
    assert (engine.stats().blocks.held, engine.has_work, seq.block_ids) == (0, False, array("q"))
