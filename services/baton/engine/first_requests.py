"""The first requests of an engine: one of each kind that its options allow, before anybody may send any.

An engine of its own runs them, over the runner and the drafter that will serve: with a scheduler, an account
of the pool and figures of its own. So the steps are those that serve, in the pool's memory, and they leave
nothing in figures, in the prefix cache, in its events or in the random numbers of later requests. Only pages
that nobody owns are written.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from llguidance import LLMatcher

from baton.core.beam_search import BeamParams
from baton.core.sampling_params import ResolvedSampling
from baton.engine.runner import ModelRunner
from baton.engine.sampling.guidance import MaskStage
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import FinishReason, Fork, Sequence, SequenceStatus
from baton.grammar.table import Grammar, compiled
from baton.grammar.vocabulary import GuidedVocabulary
from baton.parallel.ranks import RankError
from baton.process.options import StartError
from baton.speculation.speculator import Speculator

log = logging.getLogger(__name__)

OUTPUTS = 3
"""Tokens of the longest answer: enough for a draft of the second one, behind which another must fit."""
MOST_STEPS = 500
"""Steps after which the requests should be over, even if they run one by one."""
PLAIN, DRAFTED, GUIDED, FORKED, HELD = "plain", "drafted", "guided", "forked", "held"

_TOKEN = 0
"""The token of prompts."""
_ANSWER = ResolvedSampling(max_tokens=2, ignore_eos=True)
KINDS: Mapping[str, ResolvedSampling] = MappingProxyType(
    {
        PLAIN: _ANSWER,
        "greedy": replace(_ANSWER, temperature=0.0),
        "filtered": replace(_ANSWER, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1),
        "penalized": replace(
            _ANSWER, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=2
        ),
        "ruled": replace(_ANSWER, logit_bias=((_TOKEN, 1.0),), bad_word_ids=((1,), (_TOKEN, 2))),
        "scored": replace(_ANSWER, logprobs=1, prompt_logprobs=1),
        GUIDED: _ANSWER,
        FORKED: _ANSWER,
        HELD: _ANSWER,
        "beams": ResolvedSampling(max_tokens=2, beam_search=BeamParams(2)),
        # Where nothing but the prompt's token may follow, n-grams find what to draft.
        DRAFTED: replace(_ANSWER, max_tokens=OUTPUTS, allowed_token_ids=(_TOKEN,), logprobs=0),
    }
)
"""The kinds of requests: what each asks for goes another way through a step."""


class Told(Protocol):
    """What a step tells of a sequence (``baton.engine.engine.SequenceOutput``)."""

    @property
    def seq(self) -> Sequence: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def error(self) -> str | None: ...


class TrialEngine(Protocol):
    """The engine that runs the requests (``baton.engine.engine.Engine``)."""

    scheduler: Scheduler
    speculator: Speculator | None
    stalled: bool
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def has_work(self) -> bool: ...
    def check(self, seq: Sequence) -> None: ...
    def add(self, seq: Sequence) -> None: ...
    def step(self) -> Items[Told]: ...
    def release(self, seq: Sequence) -> bool: ...


def run_first_requests(engine: TrialEngine, runner: ModelRunner) -> tuple[str, ...]:
    """Run a request of each kind that the options of ``engine``, which is over ``runner``, allow. Return the
    kinds that ran.

    A plain request is the first, by itself. The others share its prompt, which they find in the cache if
    there is one, and run together, but for one that drafts, which may have all of the drafter's memory.
    StartError, in one line, if a step fails or an answer ends in an error; RankError if a rank does."""
    requests = [seq for seq in _requests(engine, runner) if _is_allowed(engine, seq)]
    together = [seq for seq in requests if seq.request_id not in (PLAIN, DRAFTED)]
    alone = {seq.request_id: [seq] for seq in requests if seq not in together}
    stage, runner.masks = runner.masks, MaskStage()
    try:
        for part in (alone.get(PLAIN, []), together, alone.get(DRAFTED, [])):
            _run(engine, part)
    finally:
        runner.masks = stage
    if engine.speculator is not None:
        engine.speculator.forget_ended()
        if DRAFTED in alone and not engine.speculator.stats.verifications:
            log.warning("the drafter drafted nothing in its first %d tokens", OUTPUTS)
            requests.remove(alone[DRAFTED][0])
    return tuple(seq.request_id for seq in requests)


def _requests(engine: TrialEngine, runner: ModelRunner) -> Iterable[Sequence]:
    """A request of each kind. Their prompt fills a block, and a part of another."""
    scheduler = engine.scheduler
    prompt = [_TOKEN] * max(1, min(scheduler.pool.block_size + 3, scheduler.longest_sequence - OUTPUTS))
    for kind, params in KINDS.items():
        seq = Sequence(kind, 0, prompt, params)
        if kind == DRAFTED and engine.speculator is None:
            continue
        if kind == GUIDED:
            grammar = _grammar(engine.vocab_size, engine.eos_token_ids)
            seq.guide = runner.guide(grammar, params, engine.eos_token_ids)
        seq.forks = (Fork(f"{kind} 2", params),) if kind == FORKED else ()
        seq.hold_after_prefill = kind == HELD
        yield seq


def _is_allowed(engine: TrialEngine, seq: Sequence) -> bool:
    """Whether the engine would take such a request from others."""
    try:
        engine.check(seq)
    except ValueError as error:
        log.debug("no request of this kind can run here: %s", error)
        return False
    return True


def _run(engine: TrialEngine, requests: list[Sequence]) -> None:
    """Run requests to their ends. StartError or RankError if they do not get there."""
    kinds = ", ".join(seq.request_id for seq in requests)
    try:
        for seq in requests:
            engine.add(seq)
        for _ in range(MOST_STEPS):
            if not engine.has_work:
                break
            for told in engine.step():
                if told.finish_reason is FinishReason.ERROR:
                    raise StartError(f"a first request ({told.seq.request_id}) failed: {told.error}")
                if told.seq.status is SequenceStatus.HELD:
                    engine.release(told.seq)
        else:
            raise StartError(f"the first requests ({kinds}) have not ended after {MOST_STEPS} steps")
    except (RankError, StartError):
        raise
    except Exception as error:
        log.exception("a step of the first requests failed")
        told_of = str(error).strip().partition("\n")[0]
        raise StartError(
            f"a step of the first requests ({kinds}) failed: {type(error).__name__}: {told_of}"
        ) from error


def _grammar(vocab_size: int, eos_token_ids: Set[int]) -> Grammar:
    """A grammar of one token, again and again. Its tokens are not the model's own, whose table takes seconds
    to build if they are many; masks and matchers are as with those."""
    only = next(token for token in itertools.count() if token not in eos_token_ids)
    names = {chr(ord("b") + token): token for token in range(only)} | {"a": only}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": only + 1, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": names, "merges": []},
    }
    vocabulary = GuidedVocabulary(json.dumps(described), vocab_size, [only + 1], [])
    start = compiled(vocabulary.tokenizer, LLMatcher.grammar_from_lark(f"start: /a{{{2 * OUTPUTS}}}/"))
    return Grammar(start, vocabulary)
