"""Bad words: runs of tokens that an output must not complete, found by an automaton over all of them.

The automaton is that of Aho and Corasick (Communications of the ACM 18, 1975). A state is the beginning of a
run, without the run's last token; behind any output the state is the longest such beginning that the output
ends with. The tokens barred there are the last tokens of the runs whose beginnings the output ends with: the
state itself, and what follows it along the failure links.

A failure link leads from a state to its longest proper end that is a state too, so the links are a tree, and
the states that end with a given one are the interval of its subtree in the tree's pre-order. That makes a
transition one search, however many links the textbook would follow: the state behind ``token`` is the child,
by ``token``, of the innermost interval around the present state that has one. For each token the bounds of
these intervals, each with the state that holds from there on, are in one sorted list.

A state is a function of the tokens before it: whoever resumes a request finds it again from the last tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_PLACE_BITS = 18
"""Bits for a place in the pre-order. There are more places than ``MAX_BAD_WORD_TOKENS``."""
_TOKEN_BITS = 32


class BadWords:
    """The automaton of some runs of tokens. It never changes: the answers of a request share it."""

    def __init__(self, runs: Iterable[tuple[int, ...]], rest: Callable[[], None] = lambda: None) -> None:
        """``runs`` have at least one token each, and ``MAX_BAD_WORD_TOKENS`` together at most. ``rest`` is
        called some times on the way, at least once in a few milliseconds of work."""
        runs = list(dict.fromkeys(runs))
        trie = _Trie.of([run[:-1] for run in runs], rest)
        fails = _failures(trie, rest)
        places, sizes = _pre_order(trie, fails)
        rest()
        bounds, states = _bounds(trie, fails, places, sizes)
        # Arrays, as bisect would make an object of numpy's for each number it looks at.
        self._bounds = array("q", bounds.tobytes())
        self._states = array("i", states.astype(np.int32).tobytes())
        self._places = array("i", places.astype(np.int32).tobytes())
        self._which, self._barred = _barred(trie, fails, [run[-1] for run in runs])
        self._longest = len(trie.levels)

    def start(self, outputs: Sequence[int]) -> int:
        """Return the state behind ``outputs``, of which only the last ones matter."""
        return self.follow(0, outputs[max(0, len(outputs) - self._longest) :])

    def follow(self, state: int, token_ids: Iterable[int]) -> int:
        """Return the state behind ``token_ids`` that follow ``state``."""
        bounds, states, places = self._bounds, self._states, self._places
        for token in token_ids:
            at = bisect_right(bounds, token << _PLACE_BITS | places[state]) - 1
            state = states[at] if at >= 0 and bounds[at] >> _PLACE_BITS == token else 0
        return state

    def barred(self, state: int) -> Ids:
        """Return the tokens that would complete a run behind ``state``. int64; nobody may change it."""
        return self._barred[self._which[state]]

    @property
    def num_states(self) -> int:
        return len(self._places)


class _Trie(NamedTuple):
    """The beginnings of all runs. State 0 is the empty one; others are numbered by length."""

    parents: Ids
    """[S - 1]: of states 1, 2, …: the state without the last token."""
    tokens: Ids
    """[S - 1]: of states 1, 2, …: the last token."""
    edges: Ids
    """[S - 1], ascending: both in one number."""
    levels: list[tuple[int, int]]
    """The first state of each length from 1 on, and the one behind the last."""
    ends: Ids
    """[R]: the state of each beginning."""

    @property
    def num_states(self) -> int:
        return len(self.parents) + 1

    @classmethod
    def of(cls, beginnings: Sequence[tuple[int, ...]], rest: Callable[[], None]) -> _Trie:
        """Make a trie, all states of a length at once."""
        order = sorted(range(len(beginnings)), key=lambda at: len(beginnings[at]), reverse=True)
        lengths = np.array([len(beginnings[at]) for at in order], np.int64)
        depth = int(lengths.max(initial=0))
        tokens = np.zeros((len(order), depth), np.int64)
        tokens[np.arange(depth) < lengths[:, None]] = [t for at in order for t in beginnings[at]]
        reached = np.zeros(len(order), np.int64)
        edges: list[Ids] = []
        levels: list[tuple[int, int]] = []
        first = 1
        for length in range(depth):
            longer = int((lengths > length).sum())
            edge, which = np.unique(
                reached[:longer] << _TOKEN_BITS | tokens[:longer, length], return_inverse=True
            )
            reached[:longer] = first + which
            edges.append(edge)
            levels.append((first, first + len(edge)))
            first += len(edge)
            rest()
        ends = np.empty(len(order), np.int64)
        ends[order] = reached
        joined = np.concatenate([np.empty(0, np.int64), *edges])
        return cls(joined >> _TOKEN_BITS, joined & (1 << _TOKEN_BITS) - 1, joined, levels, ends)


def _failures(trie: _Trie, rest: Callable[[], None]) -> Ids:
    """Return the failure link of each state, [S]. Those of a length are found together: each follows the
    links of its parent until there is a child by its token."""
    fails = np.zeros(trie.num_states, np.int64)
    for first, behind in trie.levels[1:]:
        shorter = trie.edges[: first - 1]
        left = np.arange(first, behind)
        via = fails[trie.parents[left - 1]]
        while len(left):
            wanted = via << _TOKEN_BITS | trie.tokens[left - 1]
            at = shorter.searchsorted(wanted)
            found = shorter[np.minimum(at, len(shorter) - 1)] == wanted
            fails[left[found]] = at[found] + 1
            on = ~found & (via > 0)
            left, via = left[on], fails[via[on]]
        rest()
    return fails


def _pre_order(trie: _Trie, fails: Ids) -> tuple[Ids, Ids]:
    """Return the place of each state in a pre-order of the tree of failure links, and the size of its
    subtree. Both [S]."""
    sizes = np.ones(trie.num_states, np.int64)
    for first, behind in reversed(trie.levels):
        np.add.at(sizes, fails[first:behind], sizes[first:behind])
    # The places before a state that its elder siblings take.
    order = np.argsort(fails[1:], kind="stable") + 1
    before = np.cumsum(sizes[order]) - sizes[order]
    eldest = np.searchsorted(fails[order], fails[order])
    shifts = np.zeros(trie.num_states, np.int64)
    shifts[order] = before - before[eldest]
    places = np.zeros(trie.num_states, np.int64)
    for first, behind in trie.levels:
        places[first:behind] = places[fails[first:behind]] + 1 + shifts[first:behind]
    return places, sizes


def _bounds(trie: _Trie, fails: Ids, places: Ids, sizes: Ids) -> tuple[Ids, Ids]:
    """Return the bounds, tokens and places in one number each, ascending, and the states from there on."""
    of_token = trie.tokens << _PLACE_BITS
    begins = of_token | places[trie.parents]
    ends = of_token | places[trie.parents] + sizes[trie.parents]
    # Where an interval ends the one around it goes on, which is that of the failure link's parent. Where
    # several bounds are at one place the first counts: a beginning, or else the outermost end.
    bounds, first = np.unique(np.concatenate([begins, ends]), return_index=True)
    return bounds, np.concatenate([np.arange(1, trie.num_states), fails[1:]])[first]


def _barred(trie: _Trie, fails: Ids, last: Sequence[int]) -> tuple[array[int], list[Ids]]:
    """Return lists of barred tokens, and which one is that of each state. ``last``: each run's last token."""
    own: dict[int, list[int]] = {0: []}
    for state, token in zip(trie.ends.tolist(), last, strict=True):
        own.setdefault(state, []).append(token)
    lists: list[Ids] = []
    which = np.zeros(trie.num_states, np.int64)
    ending = sorted(own)
    which[ending] = np.arange(len(ending))
    plain = np.ones(trie.num_states, bool)
    plain[ending] = False
    for first, behind in [(0, 1), *trie.levels]:
        inherits = np.flatnonzero(plain[first:behind]) + first
        which[inherits] = which[fails[inherits]]
        while len(lists) < len(ending) and ending[len(lists)] < behind:
            state = ending[len(lists)]
            more = lists[which[fails[state]]] if state else np.empty(0, np.int64)
            lists.append(np.concatenate([np.array(own[state], np.int64), more]))
    return array("i", which.astype(np.int32).tobytes()), lists
