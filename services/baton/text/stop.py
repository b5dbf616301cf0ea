"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """A set of stop strings, compiled once per request and shared by its choices; immutable.

    The strings become one automaton (Aho-Corasick): each state is a prefix of some stop string, and after any
    text the state is the longest such prefix that the text ends with. So the work is one step per character
    however many strings there are, and the state's length is exactly the text that has to be held back.
    """

    __slots__ = ("_edges", "_fail", "depth", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        """Compile the stop strings. Raises ValueError for an empty one, which would match before the first
        character."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._edges: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        """The longest stop string that ends at each state."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        """Point each state at its longest proper suffix that is a state too, shorter states first."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]
            for character, following in self._edges[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while True:
            following = self._edges[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]


class StopMatcher:
    """Watches one stream for stop strings, holding back text only while it may be the start of one.

    The match that is complete first wins, since generation ends there; of several that are complete at the
    same character, the longest. The result does not depend on how the text is cut into pushes.
    """

    __slots__ = ("_held", "_included", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, included: bool = False) -> None:
        """``included``: the text ends behind the stop string, not before it, so that nothing is held back."""
        self._stops = stops
        self._included = included
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; None before."""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Take more text; return the text that is now safe to send: after a match, the text before it, or up
        to its end.

        With ``may_match`` False nothing matches at the characters of ``text``; but a stop string that begins
        there may match later.
        """
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        for position, character in enumerate(text):
            state = stops.step(state, character)
            found = stops.match[state]
            if found is not None and may_match:
                self.matched = found
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._included else seen[: len(seen) - len(found)]
        self._state = state
        seen = self._held + text
        free = len(seen) if self._included else len(seen) - stops.depth[state]
        self._held = seen[free:]
        return seen[:free]

    def finish(self) -> str:
        """Return the text that was held back, when the stream ended without completing a stop string."""
        held, self._held = self._held, ""
        return held
