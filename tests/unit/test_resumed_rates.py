"""Which answers count as resumed, and as different."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.support.chaos.resumed import Rates, ResumedStreams, single_streams
from tests.support.chaos.streams import Choice, Question, Reply
from tests.support.random_requests import Ask
from tests.support.ring import Ring

AT = "2026-11-28 07:40:05,215"
ENDED_AT = datetime.strptime(AT, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
ASK = Ask("/v1/completions", {"prompt": "x"})


def reply(name: str, token_ids: list[int], arrivals: list[float]) -> Reply:
    choice = Choice(token_ids=token_ids, finish_reason="length", arrivals=[ENDED_AT + at for at in arrivals])
    return Reply(choices={0: choice}, id=name, usage=(1, len(token_ids)))


def test_answers_that_had_tokens_before_and_after_are_resumed_and_compared(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    told = [("a", "its worker drains"), ("b", "worker_lost: the decode worker answering this was lost")]
    told += [("c", "its worker drains"), ("d", "its worker drains"), ("e", "this worker is draining")]
    log.write_text(
        "".join(
            f"{AT} INFO baton.router.dispatch.attempts: request {name}-0: attempt 0 ended: {why}\n"
            for name, why in told
        )
    )
    ring = cast(Ring, SimpleNamespace(router=SimpleNamespace(log=log)))
    streams = ResumedStreams(ring, random.Random(1), 4, Rates("bfloat16", 1, 4))
    true = reply("calm", [1, 2, 3], [-9, -8, -7])
    streams._replies = [
        (Question(ASK, true), each)
        for each in (
            reply("a", [1, 2, 3], [-1, 1, 2]),
            reply("b", [1, 2, 4], [-1, 1, 2]),
            reply("c", [1, 2, 4], [1, 2, 3]),  # nothing was told before
            reply("d", [1, 2, 4], [-3, -2, -1]),  # all was told before
            reply("e", [1, 2, 4], [-1, 1, 2]),  # it was refused, and elsewhere from its beginning
            reply("f", [1, 2, 3], [-1, 1, 2]),  # nothing happened to it
        )
    ]
    streams._compare()
    rates = streams.rates
    assert (rates.resumed, rates.resumed_differ, rates.tokens) == (2, 1, 6)
    assert [line[:2] for line in rates.differences] == ["b:"]
    assert (rates.undisturbed, rates.undisturbed_differ) == (2, 1), "e and f"


def test_what_is_asked_has_one_answer_that_streams() -> None:
    asked = [
        ASK,
        Ask("/v1/completions", {"prompt": "x", "n": 2}),
        Ask("/v1/completions", {"prompt": "x" * 9999}),
    ]
    [one] = single_streams(asked)
    assert one.body["stream"] is True and one.body["return_token_ids"] is True
