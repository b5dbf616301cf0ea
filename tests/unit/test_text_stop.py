"""Stop strings against a plain search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.stop import StopMatcher, StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that is complete first (the longest of several), and that match."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def must_hold(text: str, stops: list[str]) -> int:
    """How many characters at the end of ``text`` may be the start of a stop string."""
    return max(
        (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
        default=0,
    )


SMALL = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    parts=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=st.lists(SMALL, min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_equals_naive_search_however_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    expected, found = naive(text, stops)
    matcher = StopMatcher(StopStrings(stops))
    sent, seen = "", ""
    for part in parts:
        sent += matcher.push(part)
        seen += part
        if matcher.matched is None:
            assert len(sent) == len(seen) - must_hold(seen, stops), "holds back exactly what it must"
    if matcher.matched is None:
        sent += matcher.finish()
    assert (sent, matcher.matched) == (expected, found)


def test_overlapping_prefixes() -> None:
    matcher = StopMatcher(StopStrings(["aab"]))
    assert [matcher.push(c) for c in "aaab"] == ["", "", "a", ""]
    assert matcher.matched == "aab"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_the_first_complete_match_wins() -> None:
    matcher = StopMatcher(StopStrings(["abcd", "bc"]))
    assert matcher.push("xabcd") == "xa"
    assert matcher.matched == "bc"


def test_an_included_stop_string_is_not_waited_for() -> None:
    """The text ends behind it: whatever begins one may be sent at once."""
    matcher = StopMatcher(StopStrings(["aab"]), included=True)
    assert [matcher.push(text) for text in ("xa", "a", "bc", "more")] == ["xa", "a", "b", ""]
    assert (matcher.matched, matcher.finish()) == ("aab", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
