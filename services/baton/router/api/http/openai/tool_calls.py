"""What a chat asks about tool calls and reasoning, resolved for the model that answers."""

from __future__ import annotations

from dataclasses import replace

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.request.errors import invalid
from baton.request.tools import ToolUse, tool_use
from baton.router.api.http.openai.schemas import ChatRequest
from baton.router.api.prepared import FormatAsked
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from baton.tools.answer import AnswerFormat
from baton.tools.formats import (
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from baton.tools.grammar import Calls, functions_of, grammar_of

FALLBACK = "hermes"
"""The format of calls that must be made by a model without a format of its own: the grammar enforces it."""


class CallPolicy:
    """The formats of the served model."""

    def __init__(self, settings: ApiSettings, tokenizer: Tokenizer, name_chars: int) -> None:
        """``name_chars``: the most characters of a function's name."""
        template = tokenizer.chat_template
        self._limits = settings.tools
        self._name_chars = name_chars
        self._tokenizer = tokenizer
        self._tools = tool_format(settings.tool_call_parser, template.tool_source if template else None)
        self._reasoning = reasoning_format(settings.reasoning_parser, template.source if template else None)

    @property
    def tells_reasoning(self) -> bool:
        """Whether the model's reasoning is told apart from its answers."""
        return self._reasoning is not None

    def use_of(self, body: ChatRequest) -> ToolUse | None:
        """Return the tools of a request. Raises RequestError for any that cannot be used."""
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, self._limits, self._name_chars)
        if use is None:
            return None
        if body.echo:
            raise invalid("echo", "echo is not allowed together with tools.")
        if body.detokenize is False:
            raise invalid("tools", "tools are called in a text, and detokenize is false.")
        self._format_for(use)
        return use

    def asked(self, body: ChatRequest, use: ToolUse | None, prompt: str, *, form: bool) -> FormatAsked | None:
        """Return how the answers to ``prompt`` are to be parsed; None: not at all. ``form``: whether they
        must have a form."""
        reasoning = None if body.echo or body.detokenize is False else self._reasoning
        if reasoning is None and use is None:
            return None
        return FormatAsked(
            reasoning=reasoning is not None,
            opened=reasoning is not None and reasoning.opened_by(prompt),
            closed=reasoning is not None and reasoning.closed_by(prompt),
            tells_reasoning=body.include_reasoning is not False,
            tools=use is not None,
            names=frozenset() if use is None else use.names,
            several=use is None or use.parallel,
            guided=form or (use is not None and use.mode != "auto"),
        )

    def format_of(self, asked: FormatAsked | None) -> AnswerFormat | None:
        """Return the format by which ``asked`` has answers parsed; None: they are not parsed."""
        if asked is None:
            return None
        reasoning = self._reasoning if asked.reasoning else None
        tools = (self._tools or TOOL_FORMATS[FALLBACK]) if asked.tools else None
        return AnswerFormat(
            reasoning=reasoning,
            opened=asked.opened,
            closed=asked.closed,
            tells_reasoning=asked.tells_reasoning,
            tools=tools,
            names=asked.names,
            several=asked.several,
            guided=asked.guided,
            marker_ids=frozenset(self._markers(reasoning, tools).values()),
        )

    def constrained(
        self, params: ResolvedSampling, use: ToolUse | None, format_: AnswerFormat | None
    ) -> ResolvedSampling:
        """Return ``params`` with the grammar of the calls that must be made, if any must. If a form is asked
        for, the grammar also has what may come instead of the form or before it: calls that may be made, and
        reasoning. Raises RequestError."""
        form = params.structured_output
        must = use is not None and use.mode != "auto"
        if format_ is None or not (must or form is not None):
            return params
        if must and form is not None:
            raise invalid(
                "tool_choice",
                "tool_choice asks for a call, and another field for an output of its own form; give one.",
            )
        if must and params.beam_search is not None:
            raise invalid("tool_choice", "tool_choice asks for a call, which use_beam_search cannot see to.")
        if form is not None and use is not None and not self._format_for(use).spelling.opening:
            raise invalid(
                "tools",
                "tools cannot be given together with a form of the answer: this model writes its calls "
                "without a marker before them, so neither could be told from the other.",
                "unsupported",
            )
        thinks = format_.reasoning is not None and not format_.closed
        if use is None and not thinks:
            return params
        grammar = grammar_of(
            None if use is None else self._calls(use),
            form=form is not None,
            thinks=thinks,
            opened=format_.opened,
            tokens=self._markers(format_.reasoning, format_.tools),
        )
        asked = StructuredOutput("grammar", grammar) if form is None else replace(form, around=grammar)
        return replace(params, structured_output=asked)

    def _calls(self, use: ToolUse) -> Calls:
        functions = functions_of(use.definitions)
        return Calls(
            self._format_for(use).spelling,
            {name: schema for name, schema in functions.items() if name in use.names},
            several=use.parallel,
        )

    def _markers(self, *formats: ReasoningFormat | ToolFormat | None) -> dict[str, int]:
        """Return the markers that are single tokens, with their ids."""
        markers = [marker for format_ in formats if format_ is not None for marker in format_.markers]
        return self._tokenizer.named_among(markers)

    def _format_for(self, use: ToolUse) -> ToolFormat:
        if self._tools is not None:
            return self._tools
        if use.mode == "auto":
            raise invalid(
                "tools",
                "This model's chat template shows no format of tool calls that this server knows; its router "
                f"can be told one (--tool-call-parser {', '.join(TOOL_FORMATS)}). A call can still be asked "
                'for by tool_choice: "required", or one function.',
                "unsupported",
            )
        return TOOL_FORMATS[FALLBACK]
