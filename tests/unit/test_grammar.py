"""Grammars are checked and compiled within their bounds, and one that goes beyond them harms nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.structured_output import Kind, StructuredOutput, choice_text
from baton.grammar import compiler as compiler_module
from baton.grammar import lanes, proof, trial
from baton.grammar.cache import GrammarCache
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.errors import GrammarBusyError, GrammarError, GrammarLimitError
from baton.grammar.limits import CACHE_BYTES, MAX_SOURCE_BYTES, TRIAL_CPU_S
from baton.grammar.simple import is_simple
from baton.grammar.source import check_source
from baton.grammar.table import Grammar, GrammarMatcher, TokenTable
from baton.text.errors import TokenizerError
from baton.text.tokenizer import SpecialTokens, Tokenizer
from tests.support.hostile_grammars import HOSTILE, variants
from tests.support.tiny_models import EOS, VOCAB_SIZE, save_byte_tokenizer
from tests.support.tiny_tokenizers import byte_fallback, byte_level, word_piece

GOOD = StructuredOutput("regex", "a+b")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return Tokenizer.from_dir(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """Its tokens are bytes."""
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
    yield compiler
    compiler.close()


@pytest.fixture
def grounds(monkeypatch: pytest.MonkeyPatch) -> list[proof.ProvingGround]:
    """Those that are made from here on."""
    made: list[proof.ProvingGround] = []

    class Noted(proof.ProvingGround):
        def __init__(self, table: TokenTable) -> None:
            super().__init__(table)
            made.append(self)

    monkeypatch.setattr(compiler_module, "ProvingGround", Noted)
    return made


def compiled(compiler: GrammarCompiler, output: StructuredOutput) -> Grammar:
    return compiler.compile(output).result(120)


def refusal(compiler: GrammarCompiler, output: StructuredOutput) -> str:
    error = compiler.compile(output).exception(120)
    assert isinstance(error, GrammarError), error
    assert "\n" not in str(error)
    return str(error)


def matches(grammar: Grammar, text: str) -> bool:
    """Whether ``text``, as bytes, is all of what the grammar describes."""
    matcher = grammar.matcher()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, "x"]}', "{}"], ["[1]", '"x"']),
        ("json_schema", '{"type": "integer"}', ["12", "-3"], ["1.5", "x"]),
        (
            "json_schema",
            '{"x-guidance": {"whitespace_flexible": false}, "type": "array"}',
            ["[1,2]"],
            ["[1, 2]"],
        ),
        ("json_schema", "true", ["12", "[]", '"x"'], ["x"]),
        ("json_schema", '{"type": "array", "items": {}}', ["[1, \n 2]", "[]"], ["[1," + " " * 50 + "2]"]),
        ("regex", r"^\d{3}-[a-c]+$", ["123-ab"], ["12-a", "^123-a$"]),
        (
            "choice",
            choice_text(["a", "ab", "naïve 🙂", 'quo"te\n']),
            ["a", "ab", "naïve 🙂", 'quo"te\n'],
            ["b"],
        ),
        ("grammar", 'start: "x" NUMBER\nNUMBER: /[0-9]+/', ["x12"], ["x", "12"]),
        ("grammar", 'root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)"]),
    ],
)
def test_what_each_kind_allows(
    compiler: GrammarCompiler, kind: Kind, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(compiler, StructuredOutput(kind, text))
    assert all(matches(grammar, each) for each in good)
    assert not any(matches(grammar, each) for each in bad)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "false", "must be an object"),
        ("json_schema", '{"type": "strng"}', "strng"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueI"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "nested deeper than 64"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)a", "look-around"),
        ("regex", "", "empty"),
        ("regex", "\ud800", "Unicode"),
        ("choice", "[]", "allowed are 1 to 4096"),
        ("choice", '["a", ""]', "choice 1 is empty"),
        ("choice", '["a", 1]', "list of strings"),
        ("grammar", "start: x", 'unknown name: "x"'),
        ("grammar", "root := x", "Expected ::="),
        ("grammar", 'start: start "a"', "no text can match"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(compiler: GrammarCompiler, kind: Kind, text: str, part: str) -> None:
    assert part in refusal(compiler, StructuredOutput(kind, text))


@pytest.mark.parametrize(
    ("around", "part"),
    [
        ("start: @for", "has no @form"),
        ("start: @form )", "expecting rule"),
        ("start: x @form", 'unknown name: "x"'),
    ],
)
def test_what_is_wrong_around_it_is_said_too(compiler: GrammarCompiler, around: str, part: str) -> None:
    assert part in refusal(compiler, StructuredOutput("regex", "a", around))


def refused_in(compiler: GrammarCompiler, output: StructuredOutput) -> float:
    """Seconds."""
    # The one before may have been the death of the process for trials.
    compiled(compiler, StructuredOutput("regex", f"warm {len(output.text)} {time.monotonic()}"))
    began = time.monotonic()
    refusal(compiler, output)
    return time.monotonic() - began


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_in_time_and_others_go_on(compiler: GrammarCompiler, name: str) -> None:
    assert any(refused_in(compiler, output) < 1.0 for output in variants(name))
    assert matches(compiled(compiler, StructuredOutput("regex", f"{name} a+")), f"{name} aa")


@pytest.mark.deep
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_found_behind_reasoning_too(compiler: GrammarCompiler, name: str) -> None:
    """Which a trial's walk would not come to the end of."""
    around = 'start: thinking @form\nthinking[suffix="</think>"]: /(.|\\n)*/\n'
    compiled(compiler, StructuredOutput("regex", "a", around))
    hidden = (replace(output, around=around) for output in variants(name))
    assert any(refused_in(compiler, output) < 1.0 for output in hidden)


def stop(pid: int) -> None:
    """Stops a process. Signals that are sent to it from now on wait; before, the first in number goes first.
    (Popen would reap a process that has ended, whose time the worker wants.)"""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


class TestAHostThatGivesOthersItsTime:
    """Which may count as CPU time here, and holds trials up."""

    @staticmethod
    def trial(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, taken_from: set[int]) -> trial.Outcome:
        """A trial of which some masks, by number, take a second of CPU time."""
        clock, masks = 0.0, 0

        def thread_time() -> float:
            nonlocal clock, masks
            masks += 1
            clock += masks // 2 in taken_from and masks % 2 == 0
            return clock

        monkeypatch.setattr("baton.grammar.trial.time.thread_time", thread_time)
        tokens = TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]).build().tokenizer
        return trial.try_out(tokens, trial.GrammarTrial("regex", "[a-z]{100}"))

    @pytest.mark.parametrize("taken_from", [{1}, {24}, {5, 10}, {1, 2}])
    def test_a_grammar_is_not_refused_for_a_mask_that_was_slow_once_or_twice(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, taken_from: set[int]
    ) -> None:
        assert self.trial(tokenizer, monkeypatch, taken_from).error is None

    @pytest.mark.parametrize("taken_from", [{1, 2, 3}, {24, 48, 72}])
    def test_and_is_if_it_is_slow_each_time(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, taken_from: set[int]
    ) -> None:
        error = self.trial(tokenizer, monkeypatch, taken_from).error
        assert error == "it is too complex: one token's mask takes over 50 ms"

    def test_a_trial_that_was_held_up_tells_nothing_and_is_held_again(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, grounds: list[proof.ProvingGround]
    ) -> None:
        compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
        compiled(compiler, StructuredOutput("regex", "warm"))
        while not compiler._lanes._others.idle:  # until then a second thread would take the next one
            time.sleep(0.001)
        process = grounds[0]._process
        assert process is not None
        stop(process.pid)
        monkeypatch.setattr(proof, "TRIAL_S", 0.2)
        error = compiler.compile(GOOD).exception(120)
        assert isinstance(error, GrammarBusyError)
        assert "over 0.2 s" in str(error)
        monkeypatch.undo()
        assert matches(compiled(compiler, GOOD), "aab")
        compiler.close()

    def test_nor_does_one_that_ended_itself_for_that(
        self, tokenizer: Tokenizer, grounds: list[proof.ProvingGround]
    ) -> None:
        """Before the worker, which stood still as well, could give it up."""
        compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
        compiled(compiler, StructuredOutput("regex", "warm"))
        while not compiler._lanes._others.idle:  # until then a second thread would take the next one
            time.sleep(0.001)
        process = grounds[0]._process
        assert process is not None
        stop(process.pid)
        held_up = compiler.compile(GOOD)
        os.kill(process.pid, signal.SIGALRM)
        os.kill(process.pid, signal.SIGCONT)
        assert isinstance(held_up.exception(120), GrammarBusyError)
        assert matches(compiled(compiler, GOOD), "aab")
        compiler.close()


def test_a_machine_that_is_only_slow_is_no_excuse(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "TRIAL_S", 0.5)
    monkeypatch.setattr(proof, "LITTLE_CPU_S", 0.02)  # so slow may the machine of this test be
    dear = HOSTILE["intersected expressions"]
    error = compiler.compile(StructuredOutput(dear.kind, dear.text + "\n# on a slow machine")).exception(120)
    assert isinstance(error, GrammarError)
    assert not isinstance(error, GrammarBusyError)
    assert "over 0.5 s" in str(error)


def test_it_says_of_what_a_grammar_takes_too_much(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "TRIAL_S", 30.0)
    dear = HOSTILE["intersected expressions"]
    assert "over 0.6 s" in refusal(
        compiler, StructuredOutput(dear.kind, dear.text + "\n# another to a cache")
    )


def test_compiled_once_and_refused_once(compiler: GrammarCompiler) -> None:
    before = compiler.stats()
    bad = StructuredOutput("regex", "once(")
    for _ in range(3):
        compiled(compiler, StructuredOutput("regex", "once"))
        refusal(compiler, bad)
    after = compiler.stats()
    assert (after.compiled - before.compiled, after.refused - before.refused) == (1, 1)
    assert (after.cache_misses - before.cache_misses, after.cache_hits - before.cache_hits) == (2, 4)
    assert after.compile_seconds > before.compile_seconds


def test_what_was_used_longest_ago_is_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_cache", GrammarCache(2, CACHE_BYTES))
    outputs = [StructuredOutput("regex", f"forget {i}") for i in range(3)]
    kept = [compiled(compiler, output) for output in outputs]
    assert compiled(compiler, outputs[2]) is kept[2]
    assert compiled(compiler, outputs[1]) is kept[1]
    assert compiled(compiler, outputs[0]) is not kept[0]
    del kept
    monkeypatch.setattr(compiler, "_cache", GrammarCache(2, 10))
    long = StructuredOutput("regex", "x" * 11)
    before = compiler.stats()
    for output in (long, StructuredOutput("regex", "y" * 11), long):  # a thread holds what it made last
        compiled(compiler, output)
    assert compiler.stats().compiled - before.compiled == 3, "too large to be kept"


def test_a_matcher_is_independent(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, GOOD)
    first, second = grammar.matcher(), grammar.matcher()
    first.consume_tokens(list(b"aab"))
    assert first.is_stopped()
    assert not second.is_stopped()
    assert masks(second) == masks(grammar.matcher())


def masks(matcher: GrammarMatcher) -> bytes:
    mask = array("B", bytes(VOCAB_SIZE // 8))
    matcher.compute_mask(mask.buffer_info()[0], len(mask))
    return mask.tobytes()


def test_replayed_tokens_lead_to_the_same_mask(compiler: GrammarCompiler) -> None:
    """State is derived from tokens: whoever follows them from the start allows the same."""
    schema = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}}'
    grammar = compiled(compiler, StructuredOutput("json_schema", schema))
    stepped = grammar.matcher()
    text = b'{"a": [1, 2.5e3, -7'
    for at, token in enumerate(text):
        replayed = grammar.matcher()
        replayed.consume_tokens(list(text[:at]))
        assert masks(replayed) == masks(stepped)
        stepped.consume_tokens([token])


def test_only_so_many_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_QUEUED", 1)
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
    try:
        futures = [compiler.compile(StructuredOutput("regex", f"{i}")) for i in range(6)]
        errors = [future.exception(120) for future in futures]
        assert errors[0] is None
        assert isinstance(errors[-1], GrammarBusyError)
        # That it was busy is no property of the grammar.
        assert matches(compiled(compiler, StructuredOutput("regex", "5")), "5")
    finally:
        compiler.close()


BOMB = HOSTILE["intersected expressions"]


def bomb(number: int) -> StructuredOutput:
    """One that is refused when it has taken all the time that a trial may, each another to a cache."""
    return StructuredOutput(BOMB.kind, f"{BOMB.text}\n# {number}")


class TestTenants:
    """One cannot take trials from another."""

    @pytest.fixture
    def shared(self, tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
        compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]), tenant_cpu_s=2.5)
        # All processes are there, as they are in a router that has served structured outputs.
        for output in (StructuredOutput("json_object"), GOOD):
            compiled(compiler, output)
        prove, both = proof.ProvingGround.prove, threading.Barrier(2)

        def beside_another(ground: proof.ProvingGround, output: StructuredOutput) -> str:
            both.wait(60)
            return prove(ground, output)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proof.ProvingGround, "prove", beside_another)
            trials = [compiler.compile(StructuredOutput("regex", f"{t}+"), t) for t in ("a", "b")]
            assert all(future.exception(60) is None for future in trials)
        yield compiler
        compiler.close()

    @pytest.mark.deep
    def test_hostile_grammars_hold_up_nobody_else_and_are_refused_when_their_budget_is_spent(
        self, shared: GrammarCompiler
    ) -> None:
        bombs = [shared.compile(bomb(number), "hostile") for number in range(8)]
        schema = StructuredOutput(
            "json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}'
        )
        for output in (schema, StructuredOutput("choice", '["a", "b"]')):
            began = time.monotonic()
            assert shared.compile(output, "honest").exception(60) is None
            assert time.monotonic() - began < 2.0, "all bombs take 5 s"
            assert not bombs[-1].done()
        # Not in the reserve: in the process that the hostile tenant does not occupy. It may have to start.
        pattern = StructuredOutput("json_schema", '{"type": "string", "pattern": "^[a-z]{3}$"}')
        assert shared.compile(pattern, "honest").exception(60) is None
        assert not bombs[-1].done()
        refusals = [future.exception(60) for future in bombs]
        # A busy machine may not tell how much one takes.
        assert isinstance(refusals[0], GrammarError) and not isinstance(refusals[0], GrammarLimitError)
        assert isinstance(refusals[-1], GrammarLimitError), "nobody tries it out any more"
        assert 0 < refusals[-1].retry_after_s < 120
        again = shared.compile(StructuredOutput("regex", "new+"), "hostile").exception(60)
        assert isinstance(again, GrammarLimitError)
        assert shared.compile(StructuredOutput("regex", "new+"), "honest").exception(60) is None
        assert shared.compile(schema, "honest").exception(0) is None, "what is known costs nothing"
        assert isinstance(shared.compile(schema, "hostile").exception(60), GrammarLimitError), "not to others"

    def test_as_many_as_one_tenant_queues_do_not_refuse_another(self, shared: GrammarCompiler) -> None:
        flood = [shared.compile(bomb(100 + number), "hostile") for number in range(70)]
        over = [f for f in flood if f.done() and isinstance(f.exception(), GrammarLimitError)]
        assert 1 <= len(over) <= 6, "one is being tried out, 64 wait"
        for number in range(10):
            output = StructuredOutput("regex", f"honest{number}")
            assert shared.compile(output, "honest").exception(60) is None

    @pytest.mark.deep
    def test_a_process_that_starts_again_is_waited_for_by_the_tenant_that_ended_it(
        self, shared: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ready = proof.ProvingGround._await_ready
        waited: list[float] = []

        def slow(self: proof.ProvingGround) -> subprocess.Popen[bytes]:
            if not self._ready:
                waited.append(time.monotonic())
                time.sleep(3.0)
            return ready(self)

        monkeypatch.setattr(proof.ProvingGround, "_await_ready", slow)
        assert isinstance(shared.compile(bomb(200), "hostile").exception(60), GrammarError)
        for number in range(10):
            began = time.monotonic()
            output = StructuredOutput("regex", f"meanwhile{number}")
            assert shared.compile(output, "honest").exception(60) is None
            assert time.monotonic() - began < 2.0
        assert len(waited) == 1


def json_object(properties: int, name: str = "p") -> str:
    return json.dumps({"type": "object", "properties": {f"{name}{i}": {} for i in range(properties)}})


@pytest.mark.parametrize(
    ("output", "simple"),
    [
        (StructuredOutput("json_object"), True),
        (StructuredOutput("choice", '["a", "b"]'), True),
        (StructuredOutput("choice", choice_text(["a" * 5000])), False),
        (StructuredOutput("json_schema", "true"), True),
        (StructuredOutput("json_schema", json_object(64)), True),
        (StructuredOutput("json_schema", json_object(65)), False),
        (
            StructuredOutput(
                "json_schema",
                '{"anyOf": [{"type": "null"}, {"items": {"enum": [1]}, "title": "t", "required": []}]}',
            ),
            True,
        ),
        (StructuredOutput("json_schema", '{"items":' * 20 + "{}" + "}" * 20), False),
        (StructuredOutput("json_schema", '{"pattern": "a"}'), False),
        (StructuredOutput("json_schema", '{"properties": {"a": {"items": {"maxItems": 9}}}}'), False),
        (StructuredOutput("json_schema", '{"properties": {"pattern": {"type": "string"}}}'), True),
        (StructuredOutput("json_schema", '{"properties": []}'), False),
        (StructuredOutput("json_schema", '{"items": "a"}'), False),
        (StructuredOutput("json_schema", "{"), False),
        (StructuredOutput("json_object", "", "start: @form"), False),
        (StructuredOutput("regex", "a"), False),
        (StructuredOutput("grammar", 'start: "a"'), False),
    ],
)
def test_what_is_simple_is_known_by_its_source(output: StructuredOutput, simple: bool) -> None:
    assert is_simple(output) is simple


def test_nothing_hostile_is_simple() -> None:
    for name in HOSTILE:
        assert not any(map(is_simple, variants(name)))


def dearest_simple() -> dict[str, str]:
    """Simple JSON schemas that cost as much as they can."""
    wide: dict[str, object] = {f"p{i}": {} for i in range(64)}
    options: list[object] = [{"properties": {f"{letter}": {}}} for letter in "abcdefghijklmnop"]
    nested: dict[str, object] = {}
    for _ in range(5):
        nested = {"anyOf": [{"items": nested}, {"type": "object", "additionalProperties": nested}]}
        if len(json.dumps(nested)) > 1800:
            break
    return {
        "wide": json.dumps({"type": "object", "properties": wide}),
        "options": json.dumps({"anyOf": options}),
        "nested": json.dumps(nested),
        "values": json.dumps({"enum": [f"{i:x}" for i in range(500)]}),
    }


@pytest.mark.parametrize("name", dearest_simple())
def test_the_dearest_simple_schema_takes_little_of_a_trial(tokenizer: Tokenizer, name: str) -> None:
    output = StructuredOutput("json_schema", dearest_simple()[name])
    assert is_simple(output)
    tokens = TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]).build().tokenizer
    best = 1.0
    for _ in range(3):
        began = time.thread_time()
        outcome = trial.try_out(tokens, trial.GrammarTrial(output.kind, output.text))
        best = min(best, time.thread_time() - began)
    assert outcome.error is None
    assert best < TRIAL_CPU_S / 4


def test_an_end_beyond_the_vocabulary_does_no_harm(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS, VOCAB_SIZE]))
    try:
        assert matches(compiled(compiler, GOOD), "ab")
    finally:
        compiler.close()


def test_a_model_that_cannot_be_guided() -> None:
    def missing() -> TokenTable:
        raise TokenizerError("there is no tokenizer.json")

    wordy = Tokenizer(word_piece(), SpecialTokens({}, frozenset(), None, None))
    for load, part in ((missing, "no tokenizer.json"), (lambda: TokenTable.of(wordy, 9, [1]), "kind")):
        compiler = GrammarCompiler(load)
        try:
            assert part in refusal(compiler, GOOD)
        finally:
            compiler.close()


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_tokens_have_the_bytes_of_the_text_they_become(backend: object) -> None:
    tokenizer = Tokenizer(backend, SpecialTokens({}, frozenset({0, 1, 2}), None, None))  # type: ignore[arg-type]
    tokens = TokenTable.of(tokenizer, tokenizer.vocab_size, [2]).build().tokenizer
    differing = [
        token
        for token in range(3, tokenizer.vocab_size)
        if tokens.decode_bytes([token]) not in (tokenizer.token_bytes(token), b"")
    ]
    assert not differing


def test_the_examples_of_the_documentation(compiler: GrammarCompiler) -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(json)?\n(.*?)```", page, re.DOTALL)
    bodies = [json.loads(text)["structured_outputs"] for kind, text in blocks if kind]
    csv, xml = (compiled(compiler, StructuredOutput("grammar", text)) for kind, text in blocks if not kind)
    assert matches(csv, 'a,b,c\n1,"x, ""y""\n",\n')
    assert matches(xml, '<note id="7"><place>at <person>Ada</person>&amp;</place></note>')
    schema, regex, choice = bodies
    for output in (
        StructuredOutput("json_schema", json.dumps(schema["json"])),
        StructuredOutput("regex", regex["regex"]),
        StructuredOutput("choice", choice_text(choice["choice"])),
    ):
        compiled(compiler, output)


def test_size_counts_in_bytes() -> None:
    check_source(StructuredOutput("regex", "é" * (MAX_SOURCE_BYTES // 2)))
    with pytest.raises(GrammarError, match=f"at most {MAX_SOURCE_BYTES}"):
        check_source(StructuredOutput("regex", "é" * (MAX_SOURCE_BYTES // 2 + 1)))
    with pytest.raises(GrammarError, match=f"at most {MAX_SOURCE_BYTES}"):
        check_source(StructuredOutput("regex", "é" * (MAX_SOURCE_BYTES // 2), "start: @form"))
