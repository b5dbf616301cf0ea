"""The search alone: against a plain one that looks at every continuation, and against all there are."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.logprobs import Logprobs
from baton.engine.sampling.beams import BeamSearch, Candidates
from baton.v1 import inference_pb2 as pb

VOCAB = 12
STOPS = frozenset({0, 5})
Path = tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def logprobs_after(path: Path, salt: int) -> tuple[float, ...]:
    """A model: log-probabilities of all tokens, scattered, and different after each path."""
    state = 17 + salt
    for token in path:
        state = (state * 31 + token * token + 7) % 9973
    logits = [((state * (i + 3) * (i + 11)) % 997) / 200 for i in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(logit - total for logit in logits)


def best(path: Path, salt: int, most: int) -> Candidates:
    logprobs = logprobs_after(path, salt)
    ids = sorted(range(VOCAB), key=lambda token: -logprobs[token])[:most]
    return Candidates(ids, [logprobs[token] for token in ids])


def found(params: BeamParams, max_outputs: int, salt: int, stops: frozenset[int] = STOPS) -> list[Path]:
    """The answers that the search finds, the best first."""
    search = BeamSearch(params, max_outputs, stops)
    most = Candidates.needed(params.width, len(stops))
    paths: list[Path] = [()]
    while True:
        parents = search.advance([best(path, salt, most) for path in paths])
        if search.done:
            return [path_of(hypothesis.beam) for hypothesis in search.hypotheses]
        paths = [(*paths[parent], beam.token) for parent, beam in zip(parents, search.beams, strict=True)]
        assert paths == [path_of(beam) for beam in search.beams]
        assert len(paths) == params.width


def path_of(beam) -> Path:  # type: ignore[no-untyped-def]
    return tuple(step.token for step in beam.path())


def plainly(params: BeamParams, max_outputs: int, salt: int, stops: frozenset[int] = STOPS) -> list[Path]:
    """The same, from the rules: every continuation of every beam is made, scored from its first token, and
    sorted."""

    def total(path: Path) -> float:
        return sum(logprobs_after(path[:at], salt)[token] for at, token in enumerate(path))

    def score(path: Path, length: int) -> float:
        return total(path) / float(length**params.length_penalty)

    width, never = params.width, params.early_stopping is EarlyStopping.NEVER
    beams: list[Path] = [()]
    complete: list[Path] = []
    for length in range(1, max_outputs + 1):
        ranked = sorted(((*beam, token) for beam in beams for token in range(VOCAB)), key=total, reverse=True)
        ending = [path for path in ranked[:width] if path[-1] in stops or length == max_outputs]
        complete = sorted(complete + ending, key=lambda path: score(path, len(path)), reverse=True)[:width]
        beams = [path for path in ranked if path[-1] not in stops][:width]
        if len(complete) < width:
            continue
        longest = max_outputs if never and params.length_penalty > 0 else length
        hopeless = score(beams[0], longest) <= score(complete[-1], len(complete[-1]))
        if params.early_stopping is EarlyStopping.ALWAYS or hopeless:
            break
    return complete


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 6),
    penalty=st.sampled_from([-2.0, -1.0, 0.0, 0.3, 1.0, 2.0, 5.0]),
    early_stopping=st.sampled_from(EarlyStopping),
    max_outputs=st.integers(1, 9),
    salt=st.integers(0, 9999),
    stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=5),
)
def test_it_finds_what_a_plain_search_finds(
    width: int,
    penalty: float,
    early_stopping: EarlyStopping,
    max_outputs: int,
    salt: int,
    stops: frozenset[int],
) -> None:
    params = BeamParams(width, penalty, early_stopping)
    wanted = plainly(params, max_outputs, salt, stops)
    assert found(params, max_outputs, salt, stops) == wanted
    assert len(wanted) == width


@pytest.mark.parametrize("salt", range(5))
def test_beams_enough_for_all_beginnings_find_the_best_there_is(salt: int) -> None:
    """Without stops, every beginning of one token is followed: of two tokens no answer is missed."""
    params = BeamParams(VOCAB, 1.0)
    answers = itertools.product(range(VOCAB), repeat=2)
    ranked = sorted(
        answers,
        key=lambda path: -(logprobs_after((), salt)[path[0]] + logprobs_after(path[:1], salt)[path[1]]),
    )
    assert found(params, 2, salt, frozenset()) == ranked[:VOCAB]


def test_one_beam_is_the_greedy_choice() -> None:
    greedy: Path = ()
    for _ in range(8):
        greedy = (*greedy, best(greedy, 3, 1).token_ids[0])
    assert found(BeamParams(1), 8, 3, frozenset()) == [greedy]


def test_early_stopping_ends_as_soon_as_there_are_answers_enough() -> None:
    search = BeamSearch(BeamParams(1, early_stopping=EarlyStopping.ALWAYS), 10, frozenset({7}))
    assert search.advance([Candidates([7, 2], [-0.1, -3.0])]) == []
    assert search.done
    [answer] = search.hypotheses
    assert (path_of(answer.beam), answer.stopped, answer.score) == ((7,), True, -0.1)


def test_an_ending_that_is_not_among_the_best_is_forgotten() -> None:
    search = BeamSearch(BeamParams(2), 10, frozenset({7}))
    search.advance([Candidates([1, 2, 7], [-0.1, -0.2, -0.3])])
    assert search.hypotheses == []
    assert [path_of(beam) for beam in search.beams] == [(1,), (2,)]


def test_at_the_greatest_length_all_beams_are_complete() -> None:
    search = BeamSearch(BeamParams(2), 1, frozenset({7}))
    search.advance([Candidates([7, 1, 2], [-0.1, -0.2, -0.3])])
    assert [(path_of(each.beam), each.stopped) for each in search.hypotheses] == [((7,), True), ((1,), False)]


def test_log_probabilities_are_those_of_the_candidates() -> None:
    search = BeamSearch(BeamParams(2), 1, frozenset(), num_logprobs=1)
    search.advance([Candidates([4, 1, 2], [-0.5, -0.5, -1.0])])
    assert [each.beam.logprobs for each in search.hypotheses] == [
        Logprobs(1, [-0.5], [1], [4], [-0.5]),
        Logprobs(1, [-0.5], [1], [4], [-0.5]),
    ]


def test_candidates_travel_as_log_probabilities() -> None:
    candidates = Candidates([4, 1, 2], [-0.5, -0.75, -1.0])
    again = Candidates.of(Logprobs.from_proto(candidates.told().to_proto()))
    assert again == candidates


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_parameters_travel(early_stopping: EarlyStopping) -> None:
    params = BeamParams(3, 0.3, early_stopping)
    assert BeamParams.from_proto(params.to_proto()) == params
    assert BeamParams.from_proto(pb.BeamSearch(width=2)) == BeamParams(2, 1.0, EarlyStopping.HEURISTIC)
