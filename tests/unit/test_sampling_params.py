"""The table of sampling parameters, and what reads it: the wire, gRPC, checks, beams, the API's schema."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.beam_search import BEAM_WIDTHS, LENGTH_PENALTIES, BeamParams, EarlyStopping
from baton.core.parameter_spec import ANY, ParameterRow, ParameterSpec, Range, table_of
from baton.core.sampling_params import PARAMETERS, ResolvedSampling, SamplingFields
from baton.core.structured_output import StructuredOutput, choice_text
from baton.engine.checks import RequestChecks
from baton.engine.sequence import Sequence
from baton.request.errors import RequestError
from baton.request.limits import ModelInfo, SamplingLimits
from baton.request.sampling import resolve
from baton.router.api.grpc.sampling import sampling_fields
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from tests.support.tiny_tokenizers import byte_level_tokenizer

VOCAB = 300
EOS = 256
MODEL = ModelInfo("m", "", max_model_len=100, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
CHECKS = RequestChecks(VOCAB, frozenset({EOS}))

TOKENS = st.integers(0, VOCAB - 1)
RUNS = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)
FORMS = st.one_of(
    st.builds(StructuredOutput, st.sampled_from(["regex", "grammar", "json_schema"]), st.text(), st.text()),
    st.builds(StructuredOutput, st.just("json_object")),
    st.builds(StructuredOutput, st.just("choice"), st.lists(st.text(max_size=3)).map(choice_text)),
)
BEAMS = st.builds(
    BeamParams,
    st.integers(int(BEAM_WIDTHS.low), int(BEAM_WIDTHS.high)),
    st.floats(LENGTH_PENALTIES.low, LENGTH_PENALTIES.high),
    st.sampled_from(EarlyStopping),
)


def singles(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats that the wire does not round."""
    return st.floats(low, high, width=32)


VALUES: Mapping[str, st.SearchStrategy[Any]] = MappingProxyType(
    {
        "max_tokens": st.integers(1, 90),
        "seed": st.integers(0, 2**64 - 1),
        "temperature": singles(0, 2),
        "top_k": st.integers(0, VOCAB),
        "top_p": singles(2**-20, 1),
        "min_p": singles(0, 1),
        "stop": st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=4).map(tuple),
        "stop_token_ids": st.frozensets(TOKENS, max_size=5),
        "ignore_eos": st.booleans(),
        "repetition_penalty": singles(2**-6, 100),
        "presence_penalty": singles(-2, 2),
        "frequency_penalty": singles(-2, 2),
        "logit_bias": st.dictionaries(TOKENS, singles(-100, 100), max_size=4).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        "min_tokens": st.just(0) | st.just(1),
        "bad_word_ids": st.lists(RUNS, unique=True, max_size=4).map(tuple),
        "allowed_token_ids": st.just(()) | st.just(tuple(range(VOCAB))),
        "logprobs": st.none() | st.integers(0, 20),
        "prompt_logprobs": st.none() | st.integers(0, 20),
        "include_stop_str_in_output": st.booleans(),
        "detokenize": st.booleans(),
        "structured_output": st.none() | FORMS,
        "beam_search": st.none() | BEAMS,
    }
)
"""Values that are allowed, of each row of the table."""

OPTIONAL = {name: values for name, values in VALUES.items() if name != "max_tokens"}

SAMPLE: Mapping[str, Any] = MappingProxyType(
    {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.5,
        "stop": ("a",),
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": ((3, 1.0),),
        "min_tokens": 1,
        "bad_word_ids": ((3, 4),),
        "allowed_token_ids": (3, 4),
        "structured_output": StructuredOutput("regex", "a"),
    }
)
"""A value of each row that no beam search goes with."""

NUMBERS = [row for row in PARAMETERS.values() if row.is_number and row.checked_range is not ANY]
REAL = [row for row in PARAMETERS.values() if row.kind is float]


def name_of(row: ParameterRow) -> str:
    return row.name


def resolved(asked: SamplingFields, **more: Any) -> ResolvedSampling:
    return resolve(
        asked, MODEL, SamplingLimits(), tokenizer(), prompt_tokens=1, default_max_tokens=None, **more
    )


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return byte_level_tokenizer(Path(directory))


def carried(params: ResolvedSampling) -> pb.SamplingParams:
    """The message that arrives."""
    return pb.SamplingParams.FromString(params.to_proto().SerializeToString())


def test_every_row_is_tried() -> None:
    assert list(VALUES) == list(PARAMETERS) == [field.name for field in fields(ResolvedSampling)]
    assert set(SAMPLE) == {row.name for row in PARAMETERS.values() if not row.with_beams}


def test_workers_check_each_number_that_could_do_harm() -> None:
    assert [row.name for row in NUMBERS] == [
        *("temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "logprobs", "prompt_logprobs"),
    ]


class TestTheWire:
    @given(st.fixed_dictionaries({"max_tokens": VALUES["max_tokens"]}, optional=OPTIONAL))
    def test_brings_what_is_sent(self, values: dict[str, Any]) -> None:
        params = ResolvedSampling(**values)
        assert ResolvedSampling.from_proto(carried(params)) == params

    def test_tells_what_workers_may_count_on(self) -> None:
        """Workers get what could be absent even where it changes nothing, and nothing else of that kind."""
        sent = [field.name for field, _ in carried(ResolvedSampling(max_tokens=5)).ListFields()]
        filters = ["temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"]
        assert sorted(sent) == sorted(["max_tokens", "detokenize", *filters])

    def test_of_an_empty_message(self) -> None:
        assert ResolvedSampling.from_proto(pb.SamplingParams()) == ResolvedSampling(max_tokens=0)

    def test_leaves_out_what_only_a_router_reads(self) -> None:
        message = pb.SamplingParams(max_tokens=5, bad_words=["a"])
        assert ResolvedSampling.from_proto(message) == ResolvedSampling(max_tokens=5)

    @pytest.mark.parametrize("row", PARAMETERS.values(), ids=name_of)
    def test_has_a_place_for_each_row(self, row: ParameterRow) -> None:
        assert row.name in pb.SamplingParams.DESCRIPTOR.fields_by_name


class TestGrpc:
    @given(st.fixed_dictionaries({**VALUES, "beam_search": st.none()}))
    def test_asks_for_what_the_message_says(self, values: dict[str, Any]) -> None:
        wanted = ResolvedSampling(**values)
        if wanted.stop:
            wanted = replace(wanted, detokenize=True)  # a stop string needs a text
        asked = sampling_fields(carried(wanted))
        assert (
            resolved(
                asked,
                logprobs=wanted.logprobs,
                bad_word_ids=wanted.bad_word_ids,
                structured_output=wanted.structured_output,
            )
            == wanted
        )

    @given(BEAMS)
    def test_asks_for_a_beam_search(self, beams: BeamParams) -> None:
        asked = sampling_fields(carried(ResolvedSampling(max_tokens=5, seed=1, beam_search=beams)))
        assert resolved(asked).beam_search == beams

    def test_gives_nothing_that_the_message_does_not(self) -> None:
        assert sampling_fields(pb.SamplingParams()) == SamplingFields(use_beam_search=False)

    def test_makes_text_of_keys_and_lists_of_what_is_repeated(self) -> None:
        message = pb.SamplingParams(logit_bias={3: 1}, stop=["a"], bad_words=["b"], stop_token_ids=[4])
        expected = SamplingFields(
            logit_bias={"3": 1.0}, stop=["a"], bad_words=["b"], stop_token_ids=[4], use_beam_search=False
        )
        asked = sampling_fields(message)
        assert asked == expected
        assert type(asked.stop) is type(asked.bad_words) is type(asked.stop_token_ids) is list


class TestRanges:
    @pytest.mark.parametrize("row", REAL, ids=name_of)
    def test_hold_for_clients(self, row: ParameterRow) -> None:
        lowest = math.nextafter(row.range.low, math.inf) if row.range.open else row.range.low
        for value in (lowest, row.range.high):
            assert getattr(resolved(only(row.name, value)), row.name) == value
        for value in (math.nextafter(lowest, -math.inf), math.nextafter(row.range.high, math.inf), math.nan):
            with pytest.raises(RequestError, match=rf"^{row.name} must be .* not {value!r}\.$") as caught:
                resolved(only(row.name, value))
            assert caught.value.param == row.name

    @pytest.mark.parametrize("row", NUMBERS, ids=name_of)
    def test_hold_for_whoever_sends(self, row: ParameterRow) -> None:
        allowed = row.checked_range
        for value in (allowed.low, allowed.high):
            CHECKS.check(asking(**{row.name: value}))
        for value in (allowed.low - 0.01, allowed.high + 1, math.nan):
            with pytest.raises(ValueError, match=rf"^{row.name} is {value!r}; allowed: .* to "):
                CHECKS.check(asking(**{row.name: value}))

    @pytest.mark.parametrize("row", REAL, ids=name_of)
    def test_of_workers_hold_what_clients_may_ask(self, row: ParameterRow) -> None:
        for value in (row.range.low, row.range.high):
            sent = carried(asking(**{row.name: value}).params)
            CHECKS.check(Sequence("r", 0, [1], ResolvedSampling.from_proto(sent)))

    def test_of_what_is_in_lists_and_searches(self) -> None:
        with pytest.raises(ValueError, match=r"^logit_bias\[3\] is 100\.5; allowed: -100 to 100$"):
            CHECKS.check(asking(logit_bias=((3, 100.5),)))
        with pytest.raises(ValueError, match=r"^length_penalty is nan; allowed: -10 to 10$"):
            CHECKS.check(asking(beam_search=BeamParams(2, math.nan)))

    @pytest.mark.parametrize(
        ("range_", "words"),
        [(Range(0, 2.0), "between 0 and 2"), (Range(0, 1, open=True), "above 0 and at most 1")],
        ids=str,
    )
    def test_in_words(self, range_: Range, words: str) -> None:
        assert str(range_) == words

    def test_are_in_the_description_of_the_api(self) -> None:
        properties = msgspec.json.schema(SamplingFields)["$defs"]["SamplingFields"]["properties"]
        told = {}
        for name, kind in properties.items():
            for number in kind.get("anyOf", ()):
                if "minimum" in number:
                    told[name] = number["minimum"], number["maximum"]
        in_the_table = {row.name: row.range for row in PARAMETERS.values() if row.is_number}
        in_all = in_the_table | {"best_of": BEAM_WIDTHS, "length_penalty": LENGTH_PENALTIES}
        assert told == {
            name: (allowed.low, allowed.high) for name, allowed in in_all.items() if allowed is not ANY
        }


def only(name: str, value: float) -> SamplingFields:
    asked = SamplingFields()
    setattr(asked, name, value)
    return asked


def asking(**values: Any) -> Sequence:
    return Sequence("r", 0, [1], ResolvedSampling(max_tokens=5, **values))


class TestBeams:
    @pytest.mark.parametrize("name", SAMPLE)
    def test_refuse_what_they_could_not_heed(self, name: str) -> None:
        row = PARAMETERS[name]
        asked = SamplingFields(use_beam_search=True, best_of=2)
        more: dict[str, Any] = {}
        match name:
            case "bad_word_ids" | "structured_output":
                more[name] = SAMPLE[name]
            case "logit_bias":
                asked.logit_bias = {str(token): bias for token, bias in SAMPLE[name]}
            case _:
                value = SAMPLE[name]
                setattr(asked, name, list(value) if isinstance(value, tuple) else value)
        with pytest.raises(RequestError, match="is not allowed with use_beam_search") as caught:
            resolved(asked, **more)
        assert caught.value.param == (row.api_name or name)

    @pytest.mark.parametrize("temperature", [0, 0.000001, 1])
    def test_go_with_a_temperature_that_changes_nothing(self, temperature: float) -> None:
        asked = SamplingFields(use_beam_search=True, best_of=2, temperature=temperature, seed=7)
        params = resolved(asked)
        assert params.temperature == temperature and params.seed == 7


class TestTheTable:
    def test_needs_a_row_for_each_field(self) -> None:
        with pytest.raises(TypeError, match=r"^Bare\.top_p must be annotated with a ParameterSpec$"):
            table_of(Bare, pb.SamplingParams.DESCRIPTOR)

    def test_has_only_what_the_wire_has(self) -> None:
        with pytest.raises(KeyError, match="charm"):
            table_of(Unsendable, pb.SamplingParams.DESCRIPTOR)

    def test_knows_what_changes_nothing(self) -> None:
        neutral = {row.name: row.neutral for row in PARAMETERS.values() if row.name != "max_tokens"}
        assert ResolvedSampling(max_tokens=5) == ResolvedSampling(max_tokens=5, **neutral)


@dataclass
class Bare:
    top_k: Annotated[int, ParameterSpec()] = 0
    top_p: float = 1.0


@dataclass
class Unsendable:
    charm: Annotated[float, ParameterSpec()] = 0.0
