"""The engine without a server: prompts in, answers out, in one process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from baton import hub
from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.engine.config import EngineConfig, EngineSettings
from baton.engine.device import choose_device, choose_dtype, device_memory, enter_device, exact_device
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.outputs import CompletionOutput, RequestOutput
from baton.engine.sequence import FinishReason as Ended
from baton.engine.sequence import Fork
from baton.engine.sequence import Sequence as EngineSequence
from baton.grammar.errors import GrammarError
from baton.grammar.table import Grammar
from baton.process.fields import arguments_from, values_of
from baton.process.options import served_name
from baton.process.start_clock import StartClock
from baton.request.defaults import SamplingDefaults
from baton.request.errors import RequestError, invalid, shown
from baton.request.limits import MAX_ANSWERS, ModelInfo, SamplingLimits
from baton.request.messages import ChatMessage, template_messages
from baton.request.params import SamplingParams
from baton.request.prompts import check_ids, check_length, check_text, render_chat
from baton.request.sampling import for_choice, resolve
from baton.request.structured import form_of
from baton.request.truncation import Truncation, truncation_of
from baton.text.choice import ChoiceText, Delta, FinishReason, TokenChunk
from baton.text.detokenizer import Detokenizer, NoText
from baton.text.errors import TextTooLongError
from baton.text.stop import StopMatcher, StopStrings
from baton.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
ChatMessages = Sequence[Mapping[str, object]]
_Prompt = TypeVar("_Prompt")

DEFAULT_MAX_TOKENS = 16
"""The default for prompts, the same as for ``/v1/completions``; a chat may fill the context."""

_FINISH: dict[Ended | None, FinishReason | None] = {None: None, Ended.STOP: "stop", Ended.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class OfflineConfig(EngineSettings):
    """The arguments of `LLM`. Device and dtype are chosen as ``baton up`` does where they are auto."""

    model: str = "demo"
    """"demo", a Hugging Face directory, or a hub id."""
    generation_config: Literal["auto", "none"] = field(default="auto", kw_only=True)
    """The source of sampling fields that a request leaves open: the model's ``generation_config.json``,
    or OpenAI's."""


class LLM:
    """A loaded model that answers prompts. The same engine, tokenizer and checks as behind the router, so the
    same seed makes the same draws; but no server, and no other processes than the ranks of a model that is
    split. The ranks end with the `LLM`: with `close`, or when nothing refers to it any more.

    One thread at a time.
    """

    @arguments_from(OfflineConfig)
    def __init__(self, config: OfflineConfig) -> None:
        """``model``: "demo", a Hugging Face directory, or a hub id. ``generation_config``: auto, and sampling
        fields that are not given are those of the model's ``generation_config.json``; none, and OpenAI's. The
        other arguments are the engine's options, as ``baton up`` explains them.

        Raises ModelError, TokenizerError or StartError when the model cannot be loaded, ValueError for
        options that cannot work (which it names), TypeError for an unknown option, and RankError when a rank
        cannot start.
        """
        clock = StartClock()
        with clock.phase("config"):
            path = hub.resolve_model(config.model)
        device = choose_device(config.device)
        with clock.phase("kernels"):
            dtype = choose_dtype(config.dtype, device, path)
        settings = values_of(config, EngineSettings) | {
            "device": device,
            "device_bytes": device_memory(device),
            "dtype": dtype,
        }
        with clock.phase("config"):
            self.tokenizer = Tokenizer.from_dir(path)
        engine_config = EngineConfig(path, **settings)
        log.info("%s", engine_config.described())
        self.engine = Engine.from_config(engine_config, clock=clock)
        self._device = exact_device(device)
        limits, pool = self.engine.scheduler.limits, self.engine.pool
        self.model = ModelInfo(
            name=served_name(config.model, None),
            revision=hub.revision_of(path),
            max_model_len=min(limits.max_model_len, pool.num_blocks * pool.block_size),
            vocab_size=self.engine.vocab_size,
            eos_token_ids=self.engine.eos_token_ids,
        )
        self._limits = SamplingLimits()
        self._defaults = SamplingDefaults.of(path, config.generation_config)
        self._numbers = itertools.count()
        self.start_times = clock.times()
        log.info("%s ready after %s", self.model.name, self.start_times)

    def close(self) -> None:
        """Ends the processes of the other ranks, if there are any. Nothing can be generated after that."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The answers to ``prompts``, in their order: each a text or token ids; one, or a list of them.

        ``params`` are for all prompts, or one for each; without any, 16 tokens are sampled. ``progress``
        shows a bar on standard error, if that is a terminal.

        Raises RequestError, a ValueError, that names the prompt or field at fault, before anything runs. An
        answer that cannot go on later ends with the finish reason "error" and an error message; the others go
        on.
        """
        given = _separate(prompts)
        requests = [
            self._request(at, prompt, given_params, add_special_tokens=True, default_max=DEFAULT_MAX_TOKENS)
            for at, prompt, given_params in _matched(given, params, "prompts")
        ]
        return self._run(requests, progress)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The answers to one chat, or to several, through the model's chat template, which begins an answer
        unless ``add_generation_prompt`` is False or ``continue_final_message`` has the last message gone on
        with. ``tools`` go to the template as they are; calls stay text. An answer may fill the context.
        Otherwise as `generate`.
        """
        given = [messages] if messages and isinstance(messages[0], Mapping) else messages
        requests = []
        for at, chat, given_params in _matched(given, params, "messages"):
            told = _messages(at, chat)
            try:
                text = render_chat(
                    self.tokenizer,
                    template_messages(told),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,  # type: ignore[arg-type]  # any JSON
                )
            except RequestError as error:
                if given is not messages:
                    raise
                # The error names one of the chat's messages, not which chat.
                raise RequestError(f"{at.prompt}: {error}", param=at.prompt, code=error.code) from error
            # The template writes the special tokens itself.
            requests.append(self._request(at, text, given_params, add_special_tokens=False, default_max=None))
        return self._run(requests, progress)

    def _request(
        self,
        at: _Place,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool,
        default_max: int | None,
    ) -> _Request:
        ids = self._prompt_ids(at.prompt, prompt, add_special_tokens, self._truncation(at, params))
        try:
            fields, asked = _checked(params), params.structured_outputs
            form = None if asked is None else form_of(asked)
            grammar = None if form is None else self._grammar(form)
            resolved = resolve(
                fields,
                self.model,
                self._limits,
                self.tokenizer,
                prompt_tokens=len(ids),
                default_max_tokens=default_max,
                logprobs=params.logprobs,
                choices=params.n,
                structured_output=form,
                n=params.n,
                defaults=self._defaults,
            )
            if not 1 <= params.n <= MAX_ANSWERS:
                raise invalid("n", f"n must be between 1 and {MAX_ANSWERS}, not {shown(params.n)}.")
        except RequestError as error:
            if not at.params:
                raise
            raise at.named(error) from error
        stops = StopStrings(resolved.stop) if resolved.stop else None
        first, *others = [
            Fork(f"offline-{next(self._numbers)}", for_choice(resolved, index)) for index in range(params.n)
        ]
        choices: list[_Choice] = []
        for index, answer in enumerate((first, *others)):
            text = self._text(answer.params, stops, ids, skip_special_tokens=params.skip_special_tokens)
            choices.append(_Choice(index, answer.request_id, text, choices))
        seq = EngineSequence(first.request_id, 0, ids, first.params, forks=tuple(others))
        return _Request(prompt if isinstance(prompt, str) else None, seq, choices, grammar)

    def _text(
        self,
        params: ResolvedSampling,
        stops: StopStrings | None,
        ids: list[int],
        *,
        skip_special_tokens: bool,
    ) -> ChoiceText:
        detokenizer: Detokenizer | NoText = NoText()
        if params.detokenize:
            detokenizer = self.tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, after=ids)
        matcher = StopMatcher(stops, included=params.include_stop_str_in_output) if stops else None
        return ChoiceText(params, detokenizer, matcher)

    def _grammar(self, form: StructuredOutput) -> Future[Grammar]:
        """The compiled grammar of ``form``; waits for the engine's compiler. RequestError if it is
        refused."""
        assert self.engine.grammars is not None
        grammar = self.engine.grammars.compile(form)
        try:
            grammar.result()
        except GrammarError as error:
            param = "structured_outputs"
            raise invalid(param, f"{param} cannot be followed: {error}.") from error
        return grammar

    def _truncation(self, at: _Place, params: SamplingParams) -> Truncation | None:
        try:
            return truncation_of(_checked(params), self.model)
        except RequestError as error:
            if not at.params:
                raise
            raise at.named(error) from error

    def _prompt_ids(
        self, param: str, prompt: Prompt, add_special_tokens: bool, truncation: Truncation | None
    ) -> list[int]:
        if isinstance(prompt, str):
            if truncation is None:
                check_text(prompt, self.tokenizer, self.model, param)
            try:
                ids = self.tokenizer.encode(prompt, add_special_tokens)
            except TextTooLongError as error:
                raise invalid(param, f"{param}: {error}.", "string_above_max_length") from error
        else:
            ids = list(prompt)
            if not all(isinstance(id_, int) for id_ in ids):
                raise invalid(param, f"{param} must be a text or token ids, not {shown(prompt)}.")
        check_ids(ids, self.model.vocab_size, param)
        return check_length(ids if truncation is None else truncation.cut(ids), self.model, param)

    def _run(self, requests: Sequence[_Request], progress: bool) -> list[RequestOutput]:
        choices = {choice.request_id: choice for request in requests for choice in request.choices}
        enter_device(self._device)  # this may be another thread than the last one
        try:
            for request in requests:
                self.engine.check(request.seq)
            for request in requests:
                self.engine.add(request.seq)
            with _bar(len(choices), progress) as bar:
                self._step_until_done(dict(choices), bar)
        finally:  # after an interrupt, too, nothing goes on
            for name in choices:
                self.engine.cancel(name, 0)
        return [request.output() for request in requests]

    def _step_until_done(self, open_choices: dict[str, _Choice], bar: _Bar) -> None:
        while open_choices:
            tokens = 0
            for output in self.engine.step():
                name = output.seq.request_id
                choice = open_choices.get(name)
                if choice is not None and output.error is not None:
                    for failed in choice.fail(output.error):
                        del open_choices[failed.request_id]
                if choice is None or not output.new_tokens:
                    continue
                tokens += len(output.new_tokens)
                choice.add(output)
                if choice.finish_reason is not None:
                    del open_choices[name]
                    if output.finish_reason is None:  # a stop string, of which the engine knows nothing
                        self.engine.cancel(name, output.seq.attempt)
            bar.advance(len(open_choices), tokens)


@dataclass(frozen=True, slots=True)
class _Place:
    """The names of a prompt and its parameters in errors; ``params`` is empty when all prompts share
    theirs."""

    prompt: str
    params: str

    def named(self, error: RequestError) -> RequestError:
        """``error``, of a field of the parameters, with the place of the parameters."""
        return invalid(f"{self.params}.{error.param}", f"{self.params}: {error}")


@dataclass(slots=True)
class _Choice:
    """One answer while it is generated."""

    index: int
    request_id: str
    text: ChoiceText
    of_prompt: list[_Choice] = field(repr=False)
    """All answers to the same prompt."""
    deltas: list[Delta] = field(default_factory=list)
    error: str | None = None

    def fail(self, error: str) -> list[_Choice]:
        """Ends the answer with an error. Returns the answers that end: before the first token, all of its
        prompt."""
        ended = [self] if self.deltas else self.of_prompt
        for choice in ended:
            choice.error = error
            # Text that was held back goes out: no stop string and no character is completed any more.
            choice.deltas.append(choice.text.add(TokenChunk((), "length")))
        log.warning("prompt %s: %d answers end with an error: %s", self.request_id, len(ended), error)
        return ended

    def add(self, output: SequenceOutput) -> None:
        chunk = TokenChunk(
            output.new_tokens,
            _FINISH[output.finish_reason],
            0 if self.deltas else output.seq.num_cached,
            output.details,
        )
        self.deltas.append(self.text.add(chunk))

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    def output(self) -> CompletionOutput:
        finish_reason = "error" if self.error is not None else self.finish_reason
        assert finish_reason is not None
        told = [delta.details.logprobs for delta in self.deltas if delta.details is not None]
        logprobs = [part for part in told if part is not None]
        return CompletionOutput(
            index=self.index,
            text="".join(delta.text for delta in self.deltas),
            token_ids=tuple(id_ for delta in self.deltas for id_ in delta.token_ids),
            finish_reason=finish_reason,
            stop_reason=self.deltas[-1].stop_reason if self.deltas else None,
            logprobs=Logprobs.join(logprobs) if logprobs else None,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """One prompt while it is answered."""

    prompt: str | None
    seq: EngineSequence
    choices: list[_Choice]
    grammar: Future[Grammar] | None = field(repr=False)
    """The grammar, held until the engine has the request and has asked for it again: the grammars of all
    prompts together may be more than are kept."""

    def output(self) -> RequestOutput:
        deltas = self.choices[0].deltas
        details = deltas[0].details if deltas else None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.seq.prompt_ids),
            outputs=tuple(choice.output() for choice in self.choices),
            prompt_logprobs=None if details is None else details.prompt_logprobs,
            cached_tokens=deltas[0].cached_tokens if deltas else 0,
        )


def _separate(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The single prompts: a text or a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    single = bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [prompts] if single else prompts  # type: ignore[list-item, return-value]


def _matched(
    prompts: Sequence[_Prompt], params: SamplingParams | Sequence[SamplingParams] | None, name: str
) -> Iterator[tuple[_Place, _Prompt, SamplingParams]]:
    """Each prompt with its parameters, and the names of both in errors."""
    if params is None or isinstance(params, SamplingParams):
        for index, prompt in enumerate(prompts):
            yield _Place(f"{name}[{index}]", ""), prompt, params or SamplingParams()
        return
    if len(params) != len(prompts):
        raise invalid("params", f"params has {len(params)} entries for {len(prompts)} {name}.")
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        yield _Place(f"{name}[{index}]", f"params[{index}]"), prompt, own


def _checked(params: SamplingParams) -> SamplingParams:
    """``params``. Raises RequestError for a value of a wrong type, which a Struct does not check."""
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        problem, _, where = str(error).partition(" - at ")  # `$.field`, or `key` in `$.field`
        param = where.rpartition("`$.")[2].removesuffix("`") or "params"
        raise invalid(param, f"{param}: {problem.replace('`', '')}.", "invalid_type") from error
    return params


def _messages(at: _Place, chat: object) -> list[ChatMessage]:
    try:
        return msgspec.convert(chat, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise invalid(at.prompt, f"{at.prompt}: {error}.", "invalid_type") from error


class _Bar:
    """The number of answers done and of tokens generated, as a progress bar."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._total = total
        self._tokens = 0
        self._task = bar.add_task("answers", total=total, tokens=0)

    def advance(self, still_open: int, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(self._task, completed=self._total - still_open, tokens=self._tokens)


@contextmanager
def _bar(total: int, shown_: bool) -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)  # standard output is the program's own
    seen = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, disable=not (shown_ and seen), transient=False) as bar:
        yield _Bar(bar, total)
