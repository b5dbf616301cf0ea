"""The harm that a tenant with a key does to the others: texts, grammars, limits, connections."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import msgspec

from loadtest.hostile.vocabulary import MIB, Attack, Felt, Found, Setup, Target, Watched
from loadtest.hostile.wire import ask, call, request
from tests.support.hostile_grammars import HOSTILE

TEXT_MIB = 7.9
PLAIN = [character for character in map(chr, range(33, 127)) if character not in '"\\']
"""Printable characters that JSON encodes in one byte."""
QUEUED = 6
QUEUED_MIB = 1.3
BOMBS = 40
TRIED = b"this worker cannot guide outputs"
"""A simulated worker's message about a grammar, once the router has tried it."""
LIMIT = 1000
"""Tokens a minute of the tenant ``small``."""
ANSWERS = 64
LEAVING = 24
LEFT_S = 4.0
REQUESTS = 400


def _noise(mib: float) -> str:
    """Return text that is a token for nearly each of its characters."""
    rng = random.Random(21)
    piece = "".join(rng.choices(PLAIN, k=1 << 16))
    return piece * int(mib * MIB / len(piece))


def _posted(path: str, document: object, key: str | None) -> bytes:
    return request(path, json.dumps(document).encode(), key=key)


async def one_text(target: Target, found: Found) -> None:
    await _texts(target, found, 1, TEXT_MIB, "evil")


async def many_texts(target: Target, found: Found) -> None:
    """Send texts at once, from a tenant that may ask once a minute; and time an honest long prompt
    meanwhile."""
    waited = asyncio.create_task(_honest_long(target, found))
    await _texts(target, found, QUEUED, QUEUED_MIB, "mean")
    await waited


async def _texts(target: Target, found: Found, count: int, mib: float, tenant: str) -> None:
    sent = _posted("/tokenize", {"prompt": _noise(mib)}, target.keys.get(tenant))
    for answer in await asyncio.gather(*(ask(target.http, sent, wait_s=30) for _ in range(count))):
        found.count(answer.ending)


async def _honest_long(target: Target, found: Found) -> None:
    await asyncio.sleep(0.5)
    sent = _posted(
        "/v1/completions",
        {"prompt": "a long prompt of words " * 800, "max_tokens": 1},
        target.keys.get("acme"),
    )
    answer = await ask(target.http, sent, wait_s=30, source=None)
    found.figures["honest_long_s"] = round(answer.seconds, 3)
    if answer.ending not in ("200", "400"):  # the context may be too short for the prompt
        found.figures["honest_failed"] = 1


async def counted_text(target: Target, found: Found) -> None:
    for path, document in (
        (
            "/v1/messages/count_tokens",
            {"model": "demo", "messages": [{"role": "user", "content": _noise(TEXT_MIB)}]},
        ),
        ("/v1/completions", {"prompt": _noise(TEXT_MIB), "max_tokens": 1}),
    ):
        answer = await ask(target.http, _posted(path, document, target.keys.get("mean")), wait_s=20)
        found.count(answer.ending)


def _big(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.whole_peak - watched.rss_before > 400


def _uncounted(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.got.get("200", 0) > 1


def _big_or_uncounted(found: Found, watched: Watched, felt: Felt) -> bool:
    return _big(found, watched, felt) or found.got.get("200", 0) > 1


async def grammars(target: Target, found: Found) -> None:
    """Send bombs, each different; and another tenant's small schema behind them."""
    bomb = HOSTILE["exponential regex"].text

    async def send(number: int) -> None:
        document = {"prompt": "a", "max_tokens": 1, "guided_regex": bomb + "(a*b?)*" * number}
        sent = _posted("/v1/completions", document, target.keys.get("evil"))
        found.count((await ask(target.http, sent, wait_s=18)).ending)

    bombs = [asyncio.create_task(send(number)) for number in range(BOMBS)]
    await asyncio.sleep(0.5)
    most = 0.0
    for number in range(4):
        document = {"prompt": "a", "max_tokens": 4, "guided_regex": f"[0-9]{{1,{number + 9}}}"}
        sent = _posted("/v1/completions", document, target.keys.get("acme"))
        answer = await ask(target.http, sent, wait_s=10, source=None)
        most = max(most, answer.seconds)
        if answer.ending != "200" and TRIED not in answer.body:
            found.figures["honest_failed"] = found.figure("honest_failed") + 1
            found.said = f"a small schema: {answer.ending} {answer.body[:120].decode(errors='replace')}"
        found.figures["honest_schema_s"] = round(most, 3)
        await asyncio.sleep(0.5)
    for task in bombs:
        task.cancel()


def _denied(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("honest_schema_s") > 2 or found.figure("honest_failed") > 0


async def tokens_a_minute(target: Target, found: Found) -> None:
    """Ask for as many answers at once as are allowed, then for the rest of the limit."""
    used = 0
    for answers in (ANSWERS, *([1] * 20)):
        document = {
            "prompt": "a",
            "n": answers,
            "max_tokens": 300 if answers > 1 else 150,
            "ignore_eos": True,
        }
        sent = _posted("/v1/completions", document, target.keys.get("small"))
        answer = await ask(target.http, sent)
        found.count(answer.ending)
        if answer.ending == "200":
            used += msgspec.json.decode(answer.body)["usage"]["total_tokens"]
        found.figures |= {"tokens": used, "of_limit": used / LIMIT}
        if answers == 1 and answer.ending != "200":
            break


def _over_limit(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("of_limit") > 1.5


async def pipelined(target: Target, found: Found) -> None:
    """Ask for long answers, then for another resource behind each, and leave."""
    document = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    sent = _posted("/v1/completions", document, target.keys.get("evil")) + request("/version")
    lines = [await call(target.http) for _ in range(LEAVING)]
    for line in lines:
        line.writer.write(sent)
    await asyncio.sleep(1.0)
    found.figures["running_before"] = await _running(target)
    for line in lines:
        line.close()
    await asyncio.sleep(LEFT_S)
    found.figures["running_after"] = await _running(target)


async def _running(target: Target) -> float:
    """Return the answers under way in the ring, by the router's metrics."""
    answer = await ask(target.http, request("/metrics"))
    lines = answer.body.decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton_admission_open_answers")
    )


def _go_on(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("running_after") >= LEAVING


async def path_in_key(target: Target, found: Found) -> None:
    key = "a` - at `$.messages[9]"
    for name in (key, "a` - at `$.messages[" + "9" * 5000 + "]"):
        document = {
            "messages": [{"role": "user", "content": "a"}],
            "structured_outputs": {name: 1},
        }
        sent = _posted("/v1/chat/completions", document, target.keys.get("evil"))
        found.count((await ask(target.http, sent)).ending)


def _server_error(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.got.get("500", 0) > 0


async def web_page(target: Target, found: Found) -> None:
    """Send the requests that a page on the operator's machine can send: a simple one, and one after DNS was
    rebound."""
    document = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    tried = {
        "plain text": {"content-type": "text/plain", "origin": "http://evil.example"},
        "no type": {"content-type": "", "origin": "http://evil.example"},
        "rebound": {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
    }
    for name, headers in tried.items():
        sent = request("/v1/completions", document, headers=headers)
        if name == "no type":
            sent = sent.replace(b"content-type: \r\n", b"")
        answer = await ask(target.http, sent)
        found.count(answer.ending)
        found.figures["answered"] = found.figure("answered") + (answer.ending == "200")
    peeked = await ask(target.http, request("/debug/requests", headers={"host": "evil.example:8000"}))
    found.figures["answered"] += peeked.ending == "200"
    found.count(peeked.ending)


def _answered(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("answered") > 0


async def filling_logs(target: Target, found: Found) -> None:
    """Send malformed requests, and upgrades to unknown protocols."""
    for number in range(REQUESTS):
        sent = request("/version", headers={"connection": "upgrade", "upgrade": "h3"})
        if number % 2:
            sent = b"NOT HTTP AT ALL\r\n\r\n"
        found.count((await ask(target.http, sent, wait_s=3)).ending)
    found.figures["requests"] = REQUESTS


def _filled(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.router_log_bytes > 20 * REQUESTS


async def audited(target: Target, found: Found) -> None:
    """Ask only, where the disk under the audit log is full; the prompt is looked for in the router's log."""
    secret = "confidential words of a prompt"
    document = {"prompt": secret, "max_tokens": 1}
    for _ in range(5):
        sent = _posted("/v1/completions", document, target.keys.get("evil"))
        found.count((await ask(target.http, sent)).ending)
    await asyncio.sleep(1.0)
    log = await asyncio.to_thread(Path(target.router_log).read_bytes)
    found.figures["told"] = log.count(secret.encode())


def _told(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("told") > 0


async def others_model(target: Target, found: Found) -> None:
    """Ask until a worker of another model would have had its turn."""
    key = target.keys.get("evil")
    until = time.monotonic() + 5
    while time.monotonic() < until:
        sent = _posted("/v1/completions", {"prompt": f"a {time.time_ns()}", "max_tokens": 24}, key)
        answers = await asyncio.gather(*(ask(target.http, sent) for _ in range(16)))
        for answer in answers:
            found.count(answer.ending)
    stranger = next(place for place in target.workers if place.name == "stranger")
    page = await ask(stranger.metrics, request("/metrics"))
    tokens = [
        line
        for line in page.body.decode().splitlines()
        if line.startswith("baton_engine_generated_tokens_total")
    ]
    found.figures["stranger_tokens"] = sum(float(line.rsplit(" ", 1)[1]) for line in tokens)


def _foreign(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("stranger_tokens") > 0


ATTACKS = (
    Attack(
        name="text-noise", finding="S16", aim="one text takes 400 MiB", run=one_text, reached=_big, max_s=40
    ),
    Attack(
        name="text-queue",
        finding="S16",
        aim="a tenant that may ask once a minute is answered more often",
        run=many_texts,
        reached=_uncounted,
        max_s=40,
    ),
    Attack(
        name="text-counted",
        finding="S16",
        aim="one text takes 400 MiB, or a limit is passed",
        run=counted_text,
        reached=_big_or_uncounted,
        max_s=45,
    ),
    Attack(
        name="grammar-bombs",
        finding="S7",
        aim="another tenant's small schema takes 2 s, or fails",
        run=grammars,
        reached=_denied,
    ),
    Attack(
        name="tokens-per-minute",
        finding="S8",
        aim="1.5 times the limit is used in one minute",
        run=tokens_a_minute,
        reached=_over_limit,
        max_s=30,
    ),
    Attack(
        name="pipelining",
        finding="S12",
        aim="24 answers go on 4 s after their clients left",
        run=pipelined,
        reached=_go_on,
    ),
    Attack(name="key-500", finding="S17", aim="a status of 500", run=path_in_key, reached=_server_error),
    Attack(
        name="web-page",
        finding="S19",
        aim="a page of another origin is answered",
        run=web_page,
        reached=_answered,
        setup=Setup(keys=False),
    ),
    Attack(
        name="log-lines",
        finding="S19",
        aim="20 bytes of log for each request",
        run=filling_logs,
        reached=_filled,
    ),
    Attack(
        name="audit-full",
        finding="S14",
        aim="prompts are in the router's own log",
        run=audited,
        reached=_told,
        setup=Setup(router=("--audit-log", "/dev/full", "--log-prompts")),
    ),
    Attack(
        name="other-model",
        finding="S18",
        aim="a worker of another model computes tokens",
        run=others_model,
        reached=_foreign,
        setup=Setup(stranger=True),
    ),
)
