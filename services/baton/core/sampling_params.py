"""The sampling parameters of one request: as a client gives them, resolved, and the table of both.

Shared by router and engine; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.core.beam_search import BEAM_WIDTHS, LENGTH_PENALTIES, BeamParams
from baton.core.parameter_spec import ANY, ParameterSpec, Range, table_of
from baton.core.structured_output import StructuredOutput
from baton.v1 import inference_pb2 as pb

GREEDY_BELOW = 1e-5
"""The temperature under which sampling is greedy: dividing logits by less overflows float32."""

_UNIT = Range(0, 1)
_PENALTIES = Range(-2.0, 2.0)
_MAX_REPETITION = 100.0
"""The greatest repetition penalty. The least is its inverse. Both keep logits finite."""
_INT32 = 2**31 - 1
_UINT32 = Range(0, 2**32 - 1)
"""Every value of a uint32 field: a high one does no harm."""


def _biases(message: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(message.items()))


def _runs(message: Iterable[pb.TokenIds]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(run.ids) for run in message)


def _runs_to_proto(runs: Iterable[tuple[int, ...]]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=run) for run in runs]


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """The sampling parameters of one request, checked for one prompt of one model, with a value for each.
    `baton.request.sampling.resolve` makes them of `SamplingFields`. They are sent to the engine as protobuf,
    and the engine checks them again (`baton.engine.checks`). Each field is a row of the table `PARAMETERS`.

    The router draws ``seed`` when the client gives none, so that a request resumed on another worker
    continues with the same random numbers. ``stop``, ``include_stop_str_in_output`` and ``detokenize`` are
    heeded by the router, which owns the text, never by the engine.
    """

    max_tokens: Annotated[int, ParameterSpec()]
    seed: Annotated[int, ParameterSpec(range=Range(-(2**63), 2**64 - 1), worker_range=ANY)] = 0
    temperature: Annotated[float, ParameterSpec(range=Range(0, 2.0), with_beams=False)] = 1.0
    top_k: Annotated[int, ParameterSpec(range=Range(-1, _INT32), worker_range=_UINT32, with_beams=False)] = 0
    top_p: Annotated[
        float, ParameterSpec(range=Range(0, 1, open=True), worker_range=_UNIT, with_beams=False)
    ] = 1.0
    min_p: Annotated[float, ParameterSpec(range=_UNIT, with_beams=False)] = 0.0
    stop: Annotated[tuple[str, ...], ParameterSpec(with_beams=False, decode=tuple)] = ()
    stop_token_ids: Annotated[frozenset[int], ParameterSpec(encode=sorted, decode=frozenset)] = frozenset()
    ignore_eos: Annotated[bool, ParameterSpec()] = False
    repetition_penalty: Annotated[
        float,
        ParameterSpec(
            range=Range(1 / _MAX_REPETITION, _MAX_REPETITION),
            worker_range=Range(0.999 / _MAX_REPETITION, _MAX_REPETITION),  # the wire rounds it to float32
            with_beams=False,
        ),
    ] = 1.0
    """Divides logits above 0 and multiplies logits below 0 of tokens in prompt or output."""
    presence_penalty: Annotated[float, ParameterSpec(range=_PENALTIES, with_beams=False)] = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Annotated[float, ParameterSpec(range=_PENALTIES, with_beams=False)] = 0.0
    """Subtracted from a token's logit for each time that the token is in the output."""
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        ParameterSpec(range=Range(-100.0, 100.0), with_beams=False, encode=dict, decode=_biases, show=dict),
    ] = ()
    """Token ids, each named once, and what is added to their logits."""
    min_tokens: Annotated[
        int, ParameterSpec(range=Range(0, _INT32), worker_range=_UINT32, with_beams=False)
    ] = 0
    """The number of first outputs that have no end of sequence, stop token or stop string."""
    bad_word_ids: Annotated[
        tuple[tuple[int, ...], ...],
        ParameterSpec(api_name="bad_words", with_beams=False, encode=_runs_to_proto, decode=_runs),
    ] = ()
    """Runs of tokens that the output never completes."""
    allowed_token_ids: Annotated[tuple[int, ...], ParameterSpec(with_beams=False, decode=tuple)] = ()
    """The only tokens that are generated. Empty: all are allowed."""
    logprobs: Annotated[int | None, ParameterSpec(worker_range=_UINT32)] = None
    """Return each output's log-probability, and those of this many likeliest tokens. None: return none."""
    prompt_logprobs: Annotated[int | None, ParameterSpec(worker_range=_UINT32)] = None
    """Return the log-probabilities of the prompt's tokens, and of this many likeliest ones. None: none."""
    include_stop_str_in_output: Annotated[bool, ParameterSpec()] = False
    """Leave the stop string, or the text of the token, that ends the answer in its text."""
    detokenize: Annotated[bool, ParameterSpec()] = True
    """Make text of the output. Without it the answer is its tokens alone, and no stop string is found."""
    structured_output: Annotated[
        StructuredOutput | None,
        ParameterSpec(
            with_beams=False,
            encode=StructuredOutput.to_proto,
            decode=StructuredOutput.from_proto,
            show=attrgetter("kind"),
        ),
    ] = None
    """The form that the output must have. It overrides ``min_tokens`` and ``ignore_eos``. None: any form."""
    beam_search: Annotated[
        BeamParams | None, ParameterSpec(encode=BeamParams.to_proto, decode=BeamParams.from_proto)
    ] = None
    """The beam search that finds the answers without sampling. None: one token is chosen at a time."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but temperature and filters changes the distribution."""
        return bool(
            self.penalizes
            or self.logit_bias
            or self.min_tokens
            or self.bad_word_ids
            or self.allowed_token_ids
        )

    def leaves_a_token(self, vocab_size: int, eos_token_ids: Set[int]) -> bool:
        """Whether at least one token may be chosen at every step, whatever was generated before."""
        barred = {run[-1] for run in self.bad_word_ids}
        if self.min_tokens:
            barred |= self.stop_token_ids | eos_token_ids
        if self.allowed_token_ids:
            return not barred.issuperset(self.allowed_token_ids)
        return len(barred) < vocab_size

    def to_proto(self) -> pb.SamplingParams:
        """Raises ValueError for a value that its protobuf field cannot hold, and for a structured output that
        is broken."""
        fields: dict[str, Any] = {}
        for (name, unsent, encode), value in zip(_ENCODERS, _values_of(self), strict=True):
            if value != unsent:
                fields[name] = value if encode is None else encode(value)
        return pb.SamplingParams(**fields)

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> ResolvedSampling:
        """Raises ValueError for an unknown early stopping of a beam search. Numbers are not checked here:
        they may be out of range."""
        fields: dict[str, Any] = {"max_tokens": 0}
        for field, value in message.ListFields():
            if field in _DECODERS:
                name, decode = _DECODERS[field]
                fields[name] = value if decode is None else decode(value)
        return cls(**fields)


PARAMETERS = table_of(ResolvedSampling, pb.SamplingParams.DESCRIPTOR)
"""The table: what holds for each sampling parameter, by its name."""

_FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name
_ENCODERS = tuple((row.name, row.unsent, row.encode) for row in PARAMETERS.values())
_DECODERS = MappingProxyType({_FIELDS[row.name]: (row.name, row.decode) for row in PARAMETERS.values()})
_values_of = attrgetter(*PARAMETERS)


def _described(description: str, numbers: Range) -> Meta:
    """Return a number's entry in the API's description. It checks nothing: `baton.request.sampling.resolve`
    does, with messages that say more."""
    return Meta(description=description, extra_json_schema={"minimum": numbers.low, "maximum": numbers.high})


def _number(name: str, description: str) -> Meta:
    """Return the entry in the API's description of a number of the table."""
    return _described(description, PARAMETERS[name].range)


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling fields of a request, as given; None is "not given"."""

    max_tokens: Annotated[int, Meta(description="How many tokens to generate at most.")] | None = None
    temperature: Annotated[float, _number("temperature", "0 takes the likeliest token.")] | None = None
    top_p: (
        Annotated[float, _number("top_p", "Keep the likeliest tokens with this total probability; above 0.")]
        | None
    ) = None
    top_k: Annotated[int, _number("top_k", "Keep this many tokens; -1 or 0: all.")] | None = None
    min_p: (
        Annotated[float, _number("min_p", "Drop tokens under this share of the likeliest one's probability.")]
        | None
    ) = None
    seed: Annotated[int, _number("seed", "Repeats the same choice.")] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="Leave the stop string, or the stop token's text, in the answer.")]
        | None
    ) = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: (
        Annotated[float, _number("repetition_penalty", "Above 1: against tokens of prompt and answer.")]
        | None
    ) = None
    presence_penalty: (
        Annotated[float, _number("presence_penalty", "Above 0: against tokens of the answer.")] | None
    ) = None
    frequency_penalty: (
        Annotated[float, _number("frequency_penalty", "Likewise, for each time they came.")] | None
    ) = None
    logit_bias: (
        Annotated[dict[str, float], Meta(description="Token id: -100 to 100, added to its logit.")] | None
    ) = None
    min_tokens: Annotated[int, _number("min_tokens", "Nothing ends the answer before.")] | None = None
    bad_words: Annotated[list[str], Meta(description="Never to be generated.")] | None = None
    allowed_token_ids: Annotated[list[int], Meta(description="Nothing else is generated.")] | None = None
    prompt_logprobs: (
        Annotated[int, Meta(description="Tell the prompt's log-probabilities and so many likeliest tokens.")]
        | None
    ) = None
    use_beam_search: (
        Annotated[bool, Meta(description="Search for the likeliest answers as wholes; draw nothing.")] | None
    ) = None
    best_of: Annotated[int, _described("How many beams to follow, from n.", BEAM_WIDTHS)] | None = None
    length_penalty: (
        Annotated[float, _described("Of beams; above 0: for long answers.", LENGTH_PENALTIES)] | None
    ) = None
    early_stopping: (
        Annotated[bool | str, Meta(description='Of a beam search: true, false or "never".')] | None
    ) = None
    detokenize: (
        Annotated[bool, Meta(description="False: the answer is its token ids, without a text.")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(description="Keep so many tokens of the prompt; -1: as many as the context has.")]
        | None
    ) = None
    truncation_side: (
        Annotated[str, Meta(description="The side that is cut off: left (default) or right.")] | None
    ) = None
