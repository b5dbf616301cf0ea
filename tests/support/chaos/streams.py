"""Workers are killed and drained under requests of all kinds, and no client may notice more than a pause.

What the answers must be is known from undisturbed runs: each question is asked twice, among others, and kept
if both answers agree. (A batch of another size adds float32 numbers in another order; an answer that hangs on
that proves nothing. With penalties, grammars and searches in it, no oracle says how close a choice was.)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import httpx

from baton.hub import resolve_model
from baton.models.config import ModelConfig
from baton.process.options import served_name
from baton.text.tokenizer import Tokenizer
from tests.support.chaos.fleet import BLOCK_SIZE, pages_of
from tests.support.family_models import FAMILY_MODELS
from tests.support.random_requests import Ask, draw
from tests.support.ring import Ring, Service, running_ring, scrape
from tests.support.rings_at_their_limit import errors_logged
from tests.support.tiny_models import Recipe
from tests.support.tiny_states import KimiLinear

Event = Literal["kill decode", "kill prefill", "drain decode", "drain prefill"]
ROLES = ("prefill", "decode")
EVENTS: tuple[Event, ...] = ("kill decode", "kill prefill", "drain decode", "drain prefill")
DRAINS: tuple[Event, ...] = ("drain decode", "drain prefill")
OPTIONS = ("--scheduling-policy", "priority")
PREFILL_OPTIONS = ("--no-prefix-caching",)
"""Questions come again and again, and prompts are to be computed."""
DECODE_OPTIONS = ("--speculative-method", "ngram", "--num-speculative-tokens", "3")
ROUTER_OPTIONS = ("--tool-call-parser", "hermes", "--log-level", "info")
STREAMS_ROOM = 16_384
"""The tokens of a sequence that has all pages of a worker to itself."""
FIRST_WORD = 4
"""The first token id of the demo model that is no special one."""
BYTE_CONTEXT = 8192
"""Positions of a tiny model, whose tokens are bytes: prompts have several times the demo model's tokens."""
MAX_S = 120.0
"""Of a request, and of a drain."""
CLOSE = 5e-3
"""How much log-probabilities may differ, in absolute terms."""
ENDED = re.compile(
    r"^(\S+ \S+) \w+ baton\.router\.dispatch\.\w+: request (\S+): attempt \d+ ended: (.*)$", re.MULTILINE
)


@dataclass
class Choice:
    """What one answer came to, however it was told."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments."""
    finish_reason: str | None = None
    stop_reason: object = None
    tokens: list[object] = field(default_factory=list)
    """Those that log-probabilities were told of."""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    """An entry for each time that they were told."""
    arrivals: list[float] = field(default_factory=list, compare=False)
    """When tokens came, by the wall clock."""

    def differs(self, true: Choice) -> str | None:
        for name in ("token_ids", "text", "calls", "finish_reason", "stop_reason", "tokens"):
            if getattr(self, name) != getattr(true, name):
                return f"{name}: {getattr(self, name)!r} instead of {getattr(true, name)!r}"
        ours, theirs = list(_numbers(self.prompt_logprobs)), list(_numbers(true.prompt_logprobs))
        if len(self.logprobs) != len(true.logprobs) or len(ours) != len(theirs):
            return f"{len(self.logprobs)} and {len(ours)} log-probabilities"
        pairs = zip(self.logprobs + ours, true.logprobs + theirs, strict=True)
        if any(abs(one - other) > CLOSE for one, other in pairs):
            return "other log-probabilities"
        return None


@dataclass
class Reply:
    """One request's answers, or how it failed."""

    choices: dict[int, Choice] = field(default_factory=dict)
    id: str = ""
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answers."""
    failure: str | None = None

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def differs(self, true: Reply) -> str | None:
        """What is wrong, or None."""
        if self.failure is not None or self.usage != true.usage or self.choices.keys() != true.choices.keys():
            return self.failure or f"usage {self.usage}, not {true.usage}, of {sorted(self.choices)}"
        wrong = (self.choices[index].differs(true.choices[index]) for index in true.choices)
        return next((each for each in wrong if each is not None), None)

    def take(self, event: dict[str, Any], now: float) -> None:
        """A document, or an event of a stream."""
        if "error" in event:
            self.failure = self.failure or f"{event['error']['code']}: {event['error']['message']}"
            return
        self.id = event["id"]
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        told = [event["prompt_logprobs"]] if event.get("prompt_logprobs") else []
        for each in event["choices"]:
            choice = self.choice(each["index"])
            choice.prompt_logprobs += told + (
                [each["prompt_logprobs"]] if each.get("prompt_logprobs") else []
            )
            _take(choice, each, now)


def _take(choice: Choice, told: dict[str, Any], now: float) -> None:
    message = told.get("message") or told.get("delta") or {}
    choice.text += told.get("text") or message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function, at = call["function"], call.get("index", len(choice.calls))
        if at == len(choice.calls):
            choice.calls.append(("", ""))
        name, arguments = choice.calls[at]
        choice.calls[at] = (
            name + (function.get("name") or ""),
            arguments + (function.get("arguments") or ""),
        )
    token_ids = told.get("token_ids") or []
    choice.token_ids += token_ids
    if token_ids:
        choice.arrivals.append(now)
    choice.finish_reason = told["finish_reason"] or choice.finish_reason
    choice.stop_reason = (
        told.get("stop_reason") if told.get("stop_reason") is not None else choice.stop_reason
    )
    logprobs = told.get("logprobs") or {}
    if "content" in logprobs:  # of a chat
        choice.tokens += [each["token"] for each in logprobs["content"]]
        choice.logprobs += [each["logprob"] for each in logprobs["content"]]
    elif logprobs:
        choice.tokens += [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)]
        choice.logprobs += [each or 0.0 for each in logprobs["token_logprobs"]]


def _numbers(value: object) -> Any:
    """All log-probabilities in a nest of lists and dicts."""
    if isinstance(value, dict):
        if "logprob" in value:
            yield value["logprob"]
        else:
            for each in value.values():
                yield from _numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)


async def ask(http: httpx.AsyncClient, question: Ask) -> Reply:
    """The reply, however it ends."""
    reply = Reply()
    try:
        async with (
            asyncio.timeout(MAX_S),
            http.stream("POST", question.path, json=question.body) as response,
        ):
            if not question.body.get("stream") or response.status_code != 200:
                reply.take(json.loads(await response.aread()), time.time())
            else:
                await _read(response, reply)
    except TimeoutError:
        reply.failure = f"not answered within {MAX_S:.0f} s"
    except httpx.HTTPError as error:
        reply.failure = f"the connection to the router broke: {error!r}"
    if reply.failure is None and not all(each.finish_reason for each in reply.choices.values()):
        reply.failure = "it ended without a finish reason"
    return reply


async def _read(response: httpx.Response, reply: Reply) -> None:
    done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            reply.take(json.loads(line[6:]), time.time())
    if not done and reply.failure is None:
        reply.failure = "the stream broke off"


@dataclass(frozen=True)
class Question:
    ask: Ask
    true: Reply


def asks(rng: random.Random, count: int, longest: int, model: str) -> list[Ask]:
    """Requests of all kinds that can be repeated, by clients that stay. ``model``: as ``--model`` has it."""
    path, name = resolve_model(model), served_name(model, None)
    tokenizer, vocab_size = Tokenizer.from_dir(path), ModelConfig.from_dir(path).vocab_size
    found = []
    for _ in range(count):
        drawn = draw(rng)
        body = _within(drawn.body, vocab_size) | {"model": name}
        body |= {"max_tokens": rng.randint(longest // 3, longest), "seed": rng.getrandbits(40)}
        if "use_beam_search" in body:
            body["max_tokens"] //= 3  # a step of a search is one of several sequences
        body["stream"] = "prompt_logprobs" not in body and rng.random() < 0.65
        if rng.random() < 0.4:
            _lengthen(body, rng)
        if isinstance(body.get("prompt"), str) and rng.random() < (0.8 if "n" in body else 0.3):
            _fill_blocks(body, tokenizer)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        features = {*drawn.features} - {"leaving", "deadline", "stream"}
        features |= {"stream"} if body["stream"] else set()
        found.append(Ask(drawn.path, body, features=frozenset(features)))
    return found


def _within(body: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the request with token ids that a model has: what is drawn has the demo model's."""

    def known(token_id: int) -> int:
        return FIRST_WORD + (token_id - FIRST_WORD) % (vocab_size - FIRST_WORD)

    body = dict(body)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in body:
            body[name] = [known(token_id) for token_id in body[name]]
    if "logit_bias" in body:
        body["logit_bias"] = {str(known(int(key))): bias for key, bias in body["logit_bias"].items()}
    return body


def _lengthen(body: dict[str, Any], rng: random.Random) -> None:
    """Have prefill take a while."""
    words = " ".join(
        "".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(rng.randint(200, 500))
    )
    if "prompt" in body:
        body["prompt"] = words + body["prompt"]
    else:
        body["messages"] = [{"role": "system", "content": words}, *body["messages"]]


def _fill_blocks(body: dict[str, Any], tokenizer: Tokenizer) -> None:
    """End the prompt where a KV block ends: with a token more it has a block more."""
    token_ids = tokenizer.encode(body["prompt"])
    body["prompt"] = token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE] or token_ids


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    events: int
    clients: int
    questions: int
    longest: int
    """Tokens of an answer, at most."""
    max_s: float = math.inf
    """Seconds after which no more events are begun."""
    kinds: tuple[Event, ...] = EVENTS
    model: str = "demo"
    """"demo", a directory, or a name in ``FAMILY_MODELS``."""
    dtype: str = "float32"
    """What workers compute in."""


@dataclass
class Report:
    """What a run found."""

    seed: int
    model: str = "demo"
    questions: int = 0
    dropped: int = 0
    """Whose two undisturbed answers differed."""
    events: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    """Complete and true."""
    tokens: int = 0
    features: Counter[str] = field(default_factory=Counter)
    """Of the requests that were interrupted."""
    interrupted: Counter[str] = field(default_factory=Counter)
    """Attempts that ended early, by why."""
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    """What an interruption added between two tokens of a stream, by why."""
    first_tokens_s: dict[str, list[float]] = field(default_factory=dict)
    """From an interruption to the first token, where there was none yet."""
    resumes: dict[str, float] = field(default_factory=dict)
    """By cause, as the router counts them."""
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class Streams:
    """Load on a ring, and what is done to its workers."""

    def __init__(self, ring: Ring, rng: random.Random, clients: int, report: Report) -> None:
        self.report = report
        self._ring = ring
        self._rng = rng
        self._clients = clients
        self._replies: list[tuple[Question, Reply]] = []
        self._stop = asyncio.Event()
        self._until = math.inf
        self._kinds = EVENTS

    async def run(self, asked: Sequence[Ask], plan: Plan) -> Report:
        began = time.monotonic()
        self._until = began + plan.max_s
        self._kinds = plan.kinds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._ring.url, timeout=None, limits=limits) as http:
            questions = await self._undisturbed(http, asked)
            clients = [asyncio.create_task(self._client(http, questions)) for _ in range(self._clients)]
            try:
                await self._disturb(plan.events)
            finally:
                self._stop.set()
                await asyncio.gather(*clients)
        await asyncio.to_thread(self._ring.wait_idle, 30.0)
        self._judge()
        self.report.seconds = time.monotonic() - began
        return self.report

    async def _undisturbed(self, http: httpx.AsyncClient, asked: Sequence[Ask]) -> list[Question]:
        async def answered(order: Sequence[Ask], at_once: int) -> dict[int, Reply]:
            room, replies = asyncio.Semaphore(at_once), dict[int, Reply]()

            async def one(question: Ask) -> None:
                async with room:
                    replies[id(question)] = await ask(http, question)

            await asyncio.gather(*map(one, order))
            return replies

        first, second = await answered(asked, self._clients), await answered(asked[::-1], self._clients // 2)
        for each in asked:
            if first[id(each)].failure is not None:
                raise ValueError(f"undisturbed: {first[id(each)].failure}: {each.body}")
        agreed = [Question(a, first[id(a)]) for a in asked if second[id(a)].differs(first[id(a)]) is None]
        self.report.questions, self.report.dropped = len(agreed), len(asked) - len(agreed)
        return agreed

    async def _client(self, http: httpx.AsyncClient, questions: Sequence[Question]) -> None:
        while not self._stop.is_set():
            question = self._rng.choice(questions)
            reply = await ask(http, question.ask)
            self._replies.append((question, reply))
            wrong = reply.differs(question.true)
            if wrong is None:
                self.report.answers += 1
                self.report.tokens += reply.usage[1]
            else:
                self.report.violations.append(f"{wrong[:600]}\n    {reply.id}: {question.ask.body}")

    # --- what is done

    async def _disturb(self, events: int) -> None:
        """Both roles at the same time, each worker when the others of its role are there."""
        async with asyncio.TaskGroup() as tasks:
            for at, role in enumerate(ROLES):
                tasks.create_task(self._disturb_role(role, (events + at) // len(ROLES)))

    async def _disturb_role(self, role: str, events: int) -> None:
        done = 0
        while done < events:
            kinds = [event for event in self._kinds if event.endswith(role)]
            if time.monotonic() > self._until:
                return
            for event in self._rng.sample(kinds, len(kinds))[: events - done]:
                await self._until_all_serve(role)
                await asyncio.sleep(self._rng.uniform(0.3, 1.5))
                await self._do(event, self._rng.choice(self._ring.of_role(role)))
                done += 1

    async def _until_all_serve(self, role: str) -> None:
        async with asyncio.timeout(60):
            while True:
                samples = await asyncio.to_thread(scrape, f"{self._ring.url}/metrics")
                up = [
                    value for name, value in samples.items() if "worker_ready" in name and f'"{role}"' in name
                ]
                if sum(up) == len(self._ring.of_role(role)):
                    return
                await asyncio.sleep(0.05)

    async def _do(self, event: Event, victim: Service) -> None:
        number, status = (signal.SIGKILL, -9) if event.startswith("kill") else (signal.SIGTERM, 0)
        victim.process.send_signal(number)
        try:
            ended: object = await asyncio.to_thread(victim.process.wait, MAX_S)
        except subprocess.TimeoutExpired:
            ended = f"nothing within {MAX_S:.0f} s"
            await asyncio.to_thread(victim.kill)
        if ended != status:
            self.report.violations.append(f"{event}: {victim.name} ended with {ended}, not {status}")
        self.report.events[event] += 1
        await asyncio.to_thread(victim.restart)

    # --- what became of it

    def _judge(self) -> None:
        replies = {reply.id: (question, reply) for question, reply in self._replies if reply.id}
        for when, name, why in ENDED.findall(self._ring.router.log.read_text()):
            at = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
            request, _, index = name.rpartition("-")
            cause = _cause(why)
            self.report.interrupted[cause] += 1
            if request in replies:
                question, reply = replies[request]
                self.report.features.update(question.ask.features)
                if question.ask.body.get("stream") and int(index) in reply.choices:
                    self._pause(cause, reply.choices[int(index)].arrivals, at)
        samples = scrape(f"{self._ring.url}/metrics")
        self.report.resumes = {
            key: value
            for key, value in samples.items()
            if re.match(r"baton_(resumes|attempts|requests_given_up)_total", key)
        }

    def _pause(self, cause: str, arrivals: Sequence[float], at: float) -> None:
        before = [each for each in arrivals if each < at]
        after = [each for each in arrivals if each >= at]
        if not after:
            return
        if not before:
            self.report.first_tokens_s.setdefault(cause, []).append(after[0] - at)
            return
        gaps = [two - one for one, two in itertools.pairwise(arrivals)]
        added = after[0] - before[-1] - statistics.median(gaps)
        self.report.pauses_s.setdefault(cause, []).append(max(0.0, added))


def _cause(why: str) -> str:
    for told, cause in (
        ("its worker drains", "decode drains"),
        ("the decode worker", "decode lost"),
        ("the prefill worker", "prefill lost"),
        ("draining", "refused by a drain"),
    ):
        if told in why:
            return cause
    return "handoff broke"


def worker_options(model: str) -> tuple[str, ...]:
    """What workers of a model, as ``--model`` has it, are started with."""
    return (*OPTIONS, "--num-blocks", str(pages_of(resolve_model(model), STREAMS_ROOM)))


def made(tmp: Path, model: str) -> str:
    """What ``--model`` is to be for the model of a plan. One of ``FAMILY_MODELS`` is saved in ``tmp``, with
    room for long prompts."""
    if model not in FAMILY_MODELS:
        return model
    builder = FAMILY_MODELS[model]
    recipe = builder.recipe if isinstance(builder, KimiLinear) else builder
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{model} has no recipe that could be given a longer context")
    recipe = replace(recipe, overrides={**recipe.overrides, "max_position_embeddings": BYTE_CONTEXT})
    builder = replace(builder, recipe=recipe) if isinstance(builder, KimiLinear) else recipe
    return str(builder(tmp / model))


def run(tmp: Path, plan: Plan) -> Report:
    """Start a ring, with its logs in ``tmp``, and carry the plan out."""
    rng = random.Random(plan.seed)
    model = made(tmp, plan.model)
    asked = asks(rng, plan.questions, plan.longest, model)
    with running_ring(
        tmp,
        model=model,
        prefill=2,
        decode=2,
        dtype=plan.dtype,
        options=worker_options(model),
        prefill_options=PREFILL_OPTIONS,
        decode_options=DECODE_OPTIONS,
        router_options=ROUTER_OPTIONS,
    ) as ring:
        streams = Streams(ring, rng, plan.clients, Report(plan.seed, plan.model))
        report = asyncio.run(streams.run(asked, plan))
        report.violations += errors_logged(ring)
    return report
