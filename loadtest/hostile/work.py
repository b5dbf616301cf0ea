"""Tenants whose valid requests make much work: a chat template that loops, and rules for tokens."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from itertools import pairwise

from loadtest.hostile.vocabulary import Attack, Felt, Found, Setup, Target, Watched
from loadtest.hostile.wire import PIECE, ask, call, request

LOOPS = 40
CHATS = 30
SLOW_S = 1.0
TIMES = 5.0
"""The ratio to the calm at which an honest chat is as good as stopped, where it takes over ``SLOW_S``."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% if 'loop' in message.content %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
"""A template that renders what is usual, and for ever if it is told to."""

SEQUENCES, TOKENS = 64, 128
WORDS, WORD_CHARS = 500, (101, 128)
"""The number of bad words, and the range of their lengths: about all that one request may have."""
RULES_TIMES = 1.5
"""The ratio of others' time between tokens beside the rules to that beside the same request without them."""


def _posted(path: str, document: object, target: Target, tenant: str) -> bytes:
    return request(path, json.dumps(document).encode(), key=target.keys.get(tenant))


async def loop_template(target: Target, found: Found) -> None:
    """Have one tenant's chats loop; and time another's, before and meanwhile."""
    await _chats(target, found, "calm_s")
    loops = [asyncio.create_task(_loop(target, found)) for _ in range(LOOPS)]
    await asyncio.sleep(0.5)
    await _chats(target, found, "attacked_s")
    for each in loops:
        each.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def _loop(target: Target, found: Found) -> None:
    document = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}
    answer = await ask(target.http, _posted("/v1/chat/completions", document, target, "evil"), wait_s=60)
    found.count(f"loop: {answer.ending}")


async def _chats(target: Target, found: Found, figure: str) -> None:
    """Ask for the count of a chat's tokens, which is rendered and not answered, and note the longest time of
    all but one."""
    took = []
    for number in range(CHATS):
        document = {"model": "demo", "messages": [{"role": "user", "content": f"hello {number}"}]}
        sent = _posted("/v1/messages/count_tokens", document, target, "acme")
        answer = await ask(target.http, sent, wait_s=30, source=None)
        found.count(f"chat: {answer.ending}")
        if answer.ending != "200":
            found.figures["failed"] = found.figure("failed") + 1
        took.append(answer.seconds)
        found.figures[figure] = round(sorted(took)[-2:][0], 4)
        await asyncio.sleep(0.05)


def _stopped(found: Found, watched: Watched, felt: Felt) -> bool:
    slow = found.figure("attacked_s") > max(SLOW_S, TIMES * found.figure("calm_s"))
    return found.figure("failed") > 0 or slow or not found.figure("attacked_s")


async def bad_words(target: Target, found: Found) -> None:
    """Ask for 64 answers, without and with as many bad words as may be, and measure an honest stream beside
    both."""
    token = await _id_of(target, "Q")
    plain = {
        "prompt": "Q",
        "max_tokens": TOKENS,
        "n": SEQUENCES,
        "ignore_eos": True,
        "logit_bias": {str(token): 100},
    }
    lengths = range(*WORD_CHARS)
    words = [
        "Q" * lengths[number % len(lengths)] + chr(97 + number // len(lengths) % 26)
        for number in range(WORDS)
    ]
    found.figures["plain_ms"] = await _beside(target, found, plain)
    found.figures["rules_ms"] = await _beside(target, found, {**plain, "bad_words": words})
    found.figures["times"] = round(found.figure("rules_ms") / found.figure("plain_ms"), 2)


async def _id_of(target: Target, text: str) -> int:
    sent = _posted("/tokenize", {"prompt": text, "add_special_tokens": False}, target, "evil")
    ids: list[int] = json.loads((await ask(target.http, sent)).body)["tokens"]
    return ids[-1]


async def _beside(target: Target, found: Found, document: Mapping[str, object]) -> float:
    """Return the 99th percentile of an honest stream's times between tokens while ``document`` is answered,
    in ms."""
    sent = _posted("/v1/completions", document, target, "evil")
    asked = asyncio.create_task(ask(target.http, sent, wait_s=120))
    gaps: list[float] = []
    while not asked.done():
        gaps += await _gaps(target, asked)
    found.count(asked.result().ending)
    gaps.sort()
    return round(1e3 * gaps[max(0, math.ceil(0.99 * len(gaps)) - 1)], 1) if gaps else math.nan


async def _gaps(target: Target, asked: asyncio.Task[object]) -> list[float]:
    """Return the times between the tokens of one stream, until it or ``asked`` has ended."""
    document = {"prompt": "an honest one", "max_tokens": 64, "ignore_eos": True, "stream": True}
    line = await call(target.http, source=None)
    times: list[float] = []
    try:
        line.writer.write(_posted("/v1/completions", document, target, "acme"))
        tail = b""
        while not asked.done() and b"[DONE]" not in tail:
            async with asyncio.timeout(30):
                data = await line.reader.read(PIECE)
            if not data:
                break
            times += [time.monotonic()] * data.count(b"data: {")
            tail = data
    finally:
        line.close()
    return [after - before for before, after in pairwise(times)]


def _slowed(found: Found, watched: Watched, felt: Felt) -> bool:
    return not found.figure("times") <= RULES_TIMES


ATTACKS = (
    Attack(
        name="template-loop",
        finding="",
        aim="another tenant's chat fails or takes over a second",
        run=loop_template,
        reached=_stopped,
        setup=Setup(template=TEMPLATE),
        max_s=90,
    ),
    Attack(
        name="bad-words",
        finding="",
        aim=f"rules make others' steps {RULES_TIMES} times as long",
        run=bad_words,
        reached=_slowed,
        setup=Setup(real=True),
        max_s=240,
        loads=True,
    ),
)
