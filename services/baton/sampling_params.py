"""How one request wants its tokens chosen. Shared by router and engine; imports no torch."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from baton.beam_search import BeamParams
from baton.structured_output import StructuredOutput
from baton.v1 import inference_pb2 as pb

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. ``seed`` is required: the router draws one when the client gives
    none, so that a request resumed on another worker continues the same stream.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 turn the respective filter off, as do a ``repetition_penalty`` of
    1 and 0 for the other penalties. ``stop`` strings are matched by whoever owns the text (the router), never
    by the engine.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    """Divides the logits above 0 of tokens in prompt or output, and multiplies those below."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """What is added to the logits of these token ids, each named once."""
    min_tokens: int = 0
    """No end of sequence, stop token or stop string among the first so many outputs."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output never completes."""
    allowed_token_ids: tuple[int, ...] = ()
    """Nothing but these is generated; empty: all are allowed."""
    logprobs: int | None = None
    """Tell each output's log-probability and those of this many likeliest tokens; None: nothing."""
    prompt_logprobs: int | None = None
    """Likewise for the prompt."""
    structured_output: StructuredOutput | None = None
    """The form that the output must have; it goes before ``min_tokens`` and ``ignore_eos``. None: any."""
    beam_search: BeamParams | None = None
    """The answers are searched for, and nothing is drawn. None: one token is chosen at a time."""

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
        """Whether some token may come at every step, whatever was generated before: otherwise one could have
        nothing to choose from."""
        barred = {run[-1] for run in self.bad_word_ids}
        if self.min_tokens:
            barred |= self.stop_token_ids | eos_token_ids
        if self.allowed_token_ids:
            return not barred.issuperset(self.allowed_token_ids)
        return len(barred) < vocab_size

    def to_proto(self) -> pb.SamplingParams:
        form = self.structured_output
        return pb.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
            bad_word_ids=[pb.TokenIds(ids=run) for run in self.bad_word_ids],
            allowed_token_ids=self.allowed_token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            structured_output=None if form is None else form.to_proto(),
            beam_search=None if self.beam_search is None else self.beam_search.to_proto(),
        )

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> SamplingParams:
        return cls(
            max_tokens=message.max_tokens,
            seed=message.seed,
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            stop=tuple(message.stop),
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            min_tokens=message.min_tokens,
            bad_word_ids=tuple(tuple(run.ids) for run in message.bad_word_ids),
            allowed_token_ids=tuple(message.allowed_token_ids),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            structured_output=StructuredOutput.from_proto(message.structured_output),
            beam_search=(
                BeamParams.from_proto(message.beam_search) if message.HasField("beam_search") else None
            ),
        )
