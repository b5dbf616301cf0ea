"""Parsers of tool calls in a model's text, as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from baton.tools.call_reader import CallReader
from baton.tools.events import CallArguments, CallBroken, CallStarted, Content, Event
from baton.tools.markers import undecided


class ToolParser(Protocol):
    """A parser that finds calls in one answer. However the text is cut into pushes, the events amount to the
    same."""

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now."""

    def finish(self) -> list[Event]:
        """Return the last events, at the end of the text."""


class _CallParser:
    """The common part of the formats: content up to a marker, and a call after it.

    White space between the markup and anything else is part of the markup. Text that is no call is content,
    markers included.
    """

    opening: str
    argument_keys: frozenset[str]

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._held = ""
        """Text that is not yet known to be content or markup."""
        self._markup: list[str] = []
        """All text so far of the call that is being read."""
        self._reader = self._new_reader()
        self._started = False
        self._num_calls = 0
        self._after_call = False
        self._events: list[Event] = []
        self._step: Callable[[], bool] = self._in_text
        """Handles the held text as far as possible; True if another step may handle more."""

    def push(self, text: str) -> list[Event]:
        self._held += text
        while self._step():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        if self._step == self._in_call:
            self._give_up_call()
        if not self._after_call or self._held.strip():
            self._say(self._held)
        self._held = ""
        return self._take_events()

    def _after(self) -> bool:
        """Handle the text after a complete call."""
        raise NotImplementedError

    def _in_text(self) -> bool:
        at = self._held.find(self.opening)
        if at < 0:
            free = len(self._held) - undecided(self._held, self.opening)
            self._say(self._held[:free])
            self._held = self._held[free:]
            return False
        content = self._held[:at].rstrip()
        self._say(content)
        self._held = self._held[len(content) :]
        return self._begin_call(at - len(content) + len(self.opening))

    def _begin_call(self, markup: int) -> bool:
        """Begin a call after ``markup`` characters of the held text."""
        self._markup, self._held = [self._held[:markup]], self._held[markup:]
        self._reader = self._new_reader()
        self._started = False
        self._step = self._in_call
        return True

    def _in_call(self) -> bool:
        reader = self._reader
        taken = reader.push(self._held)
        self._markup.append(self._held[:taken])
        self._held = self._held[taken:]
        self._tell()
        if reader.broken:
            self._give_up_call()
            self._step = self._in_text
            return True
        if reader.done:
            self._num_calls += 1
            self._after_call = True
            self._step = self._after
        return reader.done

    def _tell(self) -> None:
        """Report the progress of the call, once it has a name that was offered and its arguments have
        begun."""
        reader = self._reader
        known = reader.name in self._names and reader.begun
        if known and not self._started:
            self._started = True
            self._events.append(CallStarted(self._num_calls, reader.name or ""))
        if self._started:
            fragment = reader.take_arguments()
            if fragment:
                self._events.append(CallArguments(self._num_calls, fragment))

    def _give_up_call(self) -> None:
        markup = "".join(self._markup)
        if self._started:
            self._events.append(CallBroken(self._num_calls, markup))
            self._num_calls += 1  # a client may have seen that index
            self._after_call = False
        else:
            self._say(markup)
        self._markup.clear()

    def _say(self, text: str) -> None:
        if text:
            self._after_call = False
            self._events.append(Content(text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _new_reader(self) -> CallReader:
        return CallReader(self._names, self.argument_keys)


class HermesParser(_CallParser):
    """Parses ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, anywhere and any number of times, as
    Hermes and Qwen write it. A missing closing marker is forgiven: the JSON shows where a call ends."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    argument_keys = frozenset({"arguments"})

    def _after(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(self.closing):
            self._held = rest[len(self.closing) :]
        elif self.closing.startswith(rest):
            return False
        self._step = self._in_text
        return True


class Llama3JsonParser(_CallParser):
    """Parses ``{"name": …, "parameters": {…}}`` at the beginning of an answer or after ``<|python_tag|>``,
    several separated by ``;``, as Llama 3.1 to 3.3 write it."""

    opening = "<|python_tag|>"
    argument_keys = frozenset({"parameters", "arguments"})

    def __init__(self, names: Set[str]) -> None:
        super().__init__(names)
        self._step = self._at_start

    def _at_start(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith("{"):
            return self._begin_call(len(self._held) - len(rest))
        if self.opening.startswith(rest):
            return False
        self._step = self._in_text
        return True

    def _after(self) -> bool:
        rest = self._held.lstrip()
        behind = rest[1:].lstrip()
        if rest.startswith(";") and behind.startswith("{"):
            return self._begin_call(len(self._held) - len(behind))
        if not rest or (rest.startswith(";") and not behind):
            return False
        self._step = self._in_text
        return True
