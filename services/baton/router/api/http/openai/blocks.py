"""An answer as a sequence of blocks, reasoning, text and calls: the units of OpenAI's responses and
Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from baton.router.api.http.openai.events import ChoiceEvents
from baton.router.api.job import Job, Usage
from baton.text.choice import Delta
from baton.tools.events import CallArguments, CallBroken, CallStarted, Content, Event, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class OutputBlock:
    """One block of an answer; the text of a call is its arguments."""

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    """The log-probabilities of a text's tokens, if the request asks for them."""
    broken: str | None = None
    """All the text of what turned out not to be a call; None: not broken."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Opened(NamedTuple):
    block: OutputBlock


class Grown(NamedTuple):
    block: OutputBlock
    text: str
    logprobs: Sequence[object] = ()
    """The log-probabilities of a text's tokens so far that no earlier step has."""


class Closed(NamedTuple):
    block: OutputBlock


Step: TypeAlias = Opened | Grown | Closed


class GrowingAnswer:
    """The one answer to a job, as its deltas come. At most one block is open at a time."""

    def __init__(self, job: Job, *, keeps_raw: bool = False) -> None:
        """``keeps_raw``: whether to keep the text and the tokens as they come, too."""
        self.job = job
        self.usage = Usage.of(job)
        self.last: Delta | None = None
        """The delta that ended the answer; None while it grows."""
        self.raw_text: list[str] = []
        self.raw_ids: list[int] = []
        self._keeps_raw = keeps_raw
        self.blocks: list[OutputBlock] = []
        self._choice = None if job.format is None else ChoiceEvents(job.format)
        self._open: OutputBlock | None = None
        self._calls: dict[int, OutputBlock] = {}
        self._tokens_before_text = 0
        self._untold: list[object] = []
        """The log-probabilities of tokens whose text is not certain yet."""

    @property
    def finish_reason(self) -> str | None:
        """The finish reason: stop, length or tool_calls; None while the answer grows."""
        if self.last is None:
            return None
        return self.last.finish_reason if self._choice is None else self._choice.finish_reason(self.last)

    @property
    def reasoning_tokens(self) -> int:
        """The tokens up to the end of the reasoning, its markers included; tokens that came together with the
        first of the text count as text."""
        return self._tokens_before_text if any(block.kind == "reasoning" for block in self.blocks) else 0

    def add(self, delta: Delta, logprobs: Sequence[object] = ()) -> list[Step]:
        """Take the next delta and the log-probabilities of its tokens; return the steps that result."""
        self.usage.add(self.job, 0, delta)
        if self._keeps_raw:
            self.raw_text.append(delta.text)
            self.raw_ids += delta.token_ids
        self._untold += logprobs
        if self._choice is None:
            events: Iterable[Event] = (Content(delta.text),) if delta.text else ()
        else:
            events = self._choice.add(delta)
        steps: list[Step] = []
        for event in events:
            self._take(event, steps)
        if self._choice is not None and all(block.kind == "reasoning" for block in self.blocks):
            self._tokens_before_text += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.last = delta
            self._close(steps)
        return steps

    def whole(self) -> list[OutputBlock]:
        """Return the blocks of an answer that is sent as a whole: what was no call after all is text, in its
        place."""
        told: list[OutputBlock] = []
        for block in self.blocks:
            if block.broken is not None:
                block = OutputBlock(0, "text", pieces=[block.broken])
            if told and told[-1].kind == block.kind == "text":
                told[-1].pieces += block.pieces
                told[-1].logprobs += block.logprobs
            else:
                pieces = list(block.pieces)
                told.append(
                    OutputBlock(
                        len(told), block.kind, block.name, block.call_id, pieces, list(block.logprobs)
                    )
                )
        return told

    def _take(self, event: Event, steps: list[Step]) -> None:
        match event:
            case Content(text):
                self._grow("text", text, steps)
            case Reasoning(text):
                self._grow("reasoning", text, steps)
            case CallStarted(index, name):
                call_id = self._choice.call_id(index) if self._choice is not None else ""
                self._calls[index] = self._opened(OutputBlock(len(self.blocks), "call", name, call_id), steps)
            case CallArguments(index, text):
                self._calls[index].pieces.append(text)
                self._untold.clear()
                steps.append(Grown(self._calls[index], text))
            case CallBroken(index, text):
                self._calls[index].broken = text
                self._close(steps)

    def _grow(self, kind: Kind, text: str, steps: list[Step]) -> None:
        block = self._open
        if block is None or block.kind != kind:
            block = self._opened(OutputBlock(len(self.blocks), kind), steps)
        block.pieces.append(text)
        told, self._untold = self._untold, []
        if kind == "text":
            block.logprobs += told
        steps.append(Grown(block, text, told if kind == "text" else ()))

    def _opened(self, block: OutputBlock, steps: list[Step]) -> OutputBlock:
        self._close(steps)
        self.blocks.append(block)
        self._open = block
        steps.append(Opened(block))
        return block

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            if self._open.kind == "text":
                self._open.logprobs += self._untold
            self._untold.clear()
            steps.append(Closed(self._open))
            self._open = None
