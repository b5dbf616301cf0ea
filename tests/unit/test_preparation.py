"""Large bodies are read in processes: as small ones are, fairly, and at nobody else's risk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.request.limits import ModelInfo
from baton.router.api.errors import ApiError, RequestError
from baton.router.api.http.preparing.prepare import BodyReader, ModelPreparers
from baton.router.api.http.server.values import MAX_CONTAINERS
from baton.router.api.menu import Menu, Offer
from baton.router.api.prepared import Assignment, Document, Endpoint, PreparedJob
from baton.router.api.prompts import NotHereError
from baton.router.api.settings import ApiSettings
from baton.router.preparation.frames import ModelSetup
from baton.router.preparation.limits import LARGE_BYTES, QUICK, QUICK_BYTES, USUAL, BodyLimits
from baton.router.preparation.pool import PreparationPool
from baton.router.shared.limits import Tenant
from baton.telemetry.preparation import PreparationMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import until
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

CONTEXT = 10_000
SETTINGS = ApiSettings(reasoning_parser="think", tool_call_parser="hermes")
ACME, EVIL = Tenant("acme"), Tenant("evil")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "the quick fox"}], "seed": 1}
READ: list[tuple[Endpoint, dict[str, object]]] = [
    ("completion", {"prompt": "the quick fox", "seed": 1}),
    ("completion", {"prompt": [[5, 6, 7], [8]], "seed": 2**64 - 1, "echo": True, "logprobs": 2, "n": 2}),
    ("completion", {"prompt": ["a", "b"], "seed": 1, "logit_bias": {"5": 1.5}, "bad_words": ["fox"]}),
    ("completion", {"prompt": "a", "seed": 1, "guided_regex": "[a-z]+", "allowed_token_ids": [5, 6]}),
    ("chat", CHAT),
    ("chat", {**CHAT, "tools": [TOOL], "tool_choice": "required", "stream": True, "priority": 3}),
    ("chat", {**CHAT, "use_beam_search": True, "best_of": 4, "n": 2, "cache_salt": "mine"}),
    (
        "response",
        {"input": "hello", "seed": 1, "metadata": {"a": "b"}, "tools": [{"type": "function", "name": "f"}]},
    ),
    ("response", {"input": "hello", "seed": 1, "instructions": "be nice", "stream": True}),
    ("tokenize", {"prompt": "the quick fox", "return_token_strs": True}),
    ("tokenize", {"messages": CHAT["messages"]}),
    ("detokenize", {"tokens": [5, 6, 7]}),
    ("count", {"messages": CHAT["messages"]}),
    ("text", {"text": "the quick fox"}),
]
REFUSED: list[tuple[Endpoint, dict[str, object]]] = [
    ("completion", {}),
    ("completion", {"prompt": "a" * 100_000}),
    ("completion", {"prompt": [10**6]}),
    ("completion", {"prompt": "a", "model": "another"}),
    ("chat", {"messages": [{"role": "user", "content": 5}]}),
    ("chat", {**CHAT, "temperature": 5}),
    ("chat", {"messages": [{"role": "user", "content": "a"}] * 10_001}),
    ("response", {"input": [{"role": "user", "content": "a"}, {"role": "wrong", "content": "a"}]}),
    ("response", {"input": "a", "metadata": {"a": "b" * 513}}),
    ("message", {"messages": [{"role": "user", "content": "a"}]}),
    ("tokenize", {"prompt": "a" * (1024 * 1024 + 1)}),
    ("tokenize", {"prompt": "7" * (512 * 1024 + 1)}),
    ("detokenize", {"tokens": [5] * (1024 * 1024 + 1)}),
    ("completion", {"prompt": "a", "user": [[]] * MAX_CONTAINERS}),
]

Pools = Callable[..., AbstractAsyncContextManager[PreparationPool]]


def assignment(endpoint: Endpoint, context: int = CONTEXT) -> Assignment:
    model = ModelInfo("tiny", "r", context, 402, frozenset({0}))
    return Assignment(endpoint, Menu((Offer(("tiny",), model, True),), False))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


@pytest.fixture
def reader(tokenizer: Tokenizer) -> BodyReader:
    own = ModelPreparers.of(tokenizer, SETTINGS)
    return BodyReader(lambda place: own)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def pools(tokenizer: Tokenizer, registry: CollectorRegistry) -> Pools:
    @asynccontextmanager
    async def pool(
        *directories: Path,
        keyed: bool = True,
        usual: BodyLimits = USUAL,
        quick: BodyLimits = QUICK,
    ) -> AsyncIterator[PreparationPool]:
        paths = directories or (tokenizer.directory,)
        models = [ModelSetup(str(path), SETTINGS, f"model {n}") for n, path in enumerate(paths)]
        metrics = PreparationMetrics(registry)
        made = PreparationPool(models, metrics, shared=keyed, usual=usual, quick=quick)
        try:
            yield made
        finally:
            await made.close()

    return pool


def body(endpoint_and_fields: tuple[Endpoint, dict[str, object]]) -> tuple[Assignment, bytes]:
    endpoint, fields = endpoint_and_fields
    return assignment(endpoint), json.dumps(fields).encode()


async def test_a_body_is_read_elsewhere_as_it_is_here(reader: BodyReader, pools: Pools) -> None:
    async with pools() as pool:
        for asked, content in map(body, READ):
            here = reader.prepare(asked, content)
            assert await pool.prepare(ACME, asked, content) == here
            assert isinstance(
                here, PreparedJob if asked.endpoint in ("completion", "chat", "response") else Document
            )


def refusal(reader: BodyReader, asked: Assignment, content: bytes) -> RequestError | ApiError:
    try:
        reader.prepare(asked, content)
    except (RequestError, ApiError) as error:
        return error
    raise AssertionError("it is not refused")


@pytest.mark.deep
async def test_an_error_is_told_elsewhere_as_it_is_here(reader: BodyReader, pools: Pools) -> None:
    async with pools() as pool:
        for asked, content in map(body, REFUSED):
            here = refusal(reader, asked, content)
            with pytest.raises(ApiError) as there:
                await pool.prepare(ACME, asked, content)
            assert there.value.status == getattr(here, "status", 400)
            told = (there.value.message, there.value.param, there.value.code)
            assert told == (here.message, here.param, here.code)


def test_no_template_is_rendered_and_no_long_text_tokenized_on_the_event_loop(tokenizer: Tokenizer) -> None:
    own = ModelPreparers.of(tokenizer, SETTINGS)
    here = BodyReader(lambda place: own, max_chars=100, renders=False)
    messages = [{"role": "user", "content": ""}]
    for endpoint in ("chat", "count", "tokenize"):
        with pytest.raises(NotHereError):
            here.prepare(*body((endpoint, {"messages": messages})))
    with pytest.raises(NotHereError):
        here.prepare(*body(("completion", {"prompt": ["a" * 40] * 3})))
    assert here.prepare(*body(("completion", {"prompt": ["a" * 40] * 2})))


def long_text(chars: int) -> tuple[Assignment, bytes]:
    """A prompt that takes long, and fits."""
    return assignment("text", 10**9), json.dumps({"text": "7 " * (chars // 2)}).encode()


async def test_one_tenants_bodies_do_not_hold_up_those_of_another(pools: Pools) -> None:
    async with pools() as pool:
        await asyncio.gather(
            *(pool.prepare(ACME, *body(READ[0])) for _ in range(2))
        )  # both processes are there
        bombs = [asyncio.create_task(pool.prepare(EVIL, *long_text(1_500_000))) for _ in range(6)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            await pool.prepare(ACME, *body(READ[0]))
        assert not any(bomb.done() for bomb in bombs[1:]), "all of acme's go before the second of evil's"
        for bomb in bombs:
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)


@pytest.mark.deep
async def test_what_waits_is_bounded_in_bytes_and_fair(pools: Pools, registry: CollectorRegistry) -> None:
    async with pools() as pool:
        large = assignment("completion"), json.dumps({"prompt": "a" * 8_000_000}).encode()
        answers = [asyncio.create_task(pool.prepare(EVIL, *large)) for _ in range(12)]
        await asyncio.sleep(0)
        assert await pool.prepare(ACME, *body(READ[0]))
        errors = await asyncio.gather(*answers, return_exceptions=True)
    assert all(isinstance(error, ApiError) for error in errors)
    statuses = [error.status for error in errors if isinstance(error, ApiError)]
    assert set(statuses) == {400, 429} and statuses.count(429) >= 3
    labels = {"tenant": "evil", "reason": "tenant"}
    assert registry.get_sample_value("baton_preparation_refused_total", labels) == statuses.count(429)


def children() -> set[int]:
    told = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="ascii")
    return {int(child) for child in told.split()}


async def test_a_process_that_dies_hurts_one_request(pools: Pools, registry: CollectorRegistry) -> None:
    before = children()
    async with pools() as pool:
        asked = asyncio.create_task(pool.prepare(EVIL, *long_text(6_000_000)))
        await until(lambda: bool(children() - before), 5)
        other = asyncio.create_task(pool.prepare(ACME, *body(READ[0])))
        [victim, *_] = sorted(children() - before)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ApiError, match="was ended") as told:
            await asked
        assert told.value.status == 503, "the system has little memory: the body need not be at fault"
        assert await other
        assert await pool.prepare(EVIL, *body(READ[0]))
    assert registry.get_sample_value("baton_preparation_processes_lost_total", {"reason": "died"}) == 1
    await until(lambda: not children() - before, 5)


async def test_a_body_that_takes_too_long_is_refused(pools: Pools) -> None:
    async with pools(usual=msgspec.structs.replace(USUAL, cpu_s=0.1)) as pool:
        with pytest.raises(ApiError, match=r"takes more than 0\.1 s to be read") as told:
            await pool.prepare(EVIL, *long_text(6_000_000))
        assert (told.value.status, told.value.code) == (400, "request_too_complex")
        assert await pool.prepare(EVIL, *body(READ[0]))


@pytest.mark.deep
async def test_a_body_that_takes_too_much_memory_is_refused(
    pools: Pools, registry: CollectorRegistry
) -> None:
    died = 0
    async with pools(usual=msgspec.structs.replace(USUAL, address_bytes=110 << 20)) as pool:
        ids = b'{"prompt": [' + b",".join([b"70000"] * 1_300_000) + b"]}"
        strings = b'{"prompt": "a", "user": [' + b",".join([b'"abc"'] * 900_000) + b"]}"
        for asked, content in (
            (assignment("completion"), ids),  # what decodes JSON says that there is no memory,
            (assignment("completion"), strings),  # or does not look,
            (assignment("text", 10**9), json.dumps({"text": "7 " * 500_000}).encode()),  # tokenizers abort,
            (assignment("completion"), b" " * (100 << 20)),  # and here there is none for the body itself
        ):
            alive = children()
            with pytest.raises(ApiError, match="too much memory") as told:
                await pool.prepare(EVIL, asked, content)
            assert (told.value.status, told.value.code) == (400, "request_too_complex")
            died += len(alive - children())
            assert await pool.prepare(EVIL, *long_text(QUICK_BYTES))
    # Where the list of strings meets the limit decides whether its process says so or dies.
    labels = {"reason": "too_complex"}
    assert registry.get_sample_value("baton_preparation_processes_lost_total", labels) == died >= 2


@pytest.mark.deep
async def test_large_bodies_are_read_one_at_a_time_beside_small_ones(pools: Pools) -> None:
    before = children()
    async with pools() as pool:
        large = [
            asyncio.create_task(pool.prepare(who, *long_text(LARGE_BYTES + 2))) for who in (EVIL, ACME) * 2
        ]
        while not all(each.done() for each in large):
            assert len(children() - before) <= 1
            await asyncio.sleep(0.01)
        large = [asyncio.create_task(pool.prepare(EVIL, *long_text(1_000_000))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await pool.prepare(EVIL, *body(READ[0]))
        assert not all(each.done() for each in large)
        assert len(children() - before) == 2
        await asyncio.gather(*large)


async def test_a_client_that_leaves_gives_its_place_back(pools: Pools) -> None:
    async with pools() as pool:
        reading = [asyncio.create_task(pool.prepare(EVIL, *long_text(1_000_000))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for each in reading:  # one is being read, the others wait
            each.cancel()
        began = time.perf_counter()
        assert await pool.prepare(EVIL, *body(READ[0]))
        assert time.perf_counter() - began < 30
        await asyncio.gather(*reading, return_exceptions=True)
        again = await asyncio.gather(*(pool.prepare(EVIL, *body(READ[0])) for _ in range(4)))
        assert len(again) == 4


async def test_a_process_waits_for_the_first_body(pools: Pools, registry: CollectorRegistry) -> None:
    async with pools() as pool:
        await pool.start()
        assert registry.get_sample_value("baton_preparation_processes") == 1
        [first] = pool._started._idle
        await pool.prepare(ACME, *long_text(QUICK_BYTES))
        assert pool._started._idle == [first]


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(x=VALUE) %}{% for i in range(99999) %}{% set ns.x = GROWN %}{% endfor %}"
SPELLINGS = {
    "nested loops": ENDLESS,
    "a text doubled": GROWS.replace("VALUE", "'aa'").replace("GROWN", "ns.x ~ ns.x"),
    "a list doubled": GROWS.replace("VALUE", "[1]").replace("GROWN", "ns.x + ns.x"),
    "a number squared": GROWS.replace("VALUE", "7").replace("GROWN", "ns.x * ns.x"),
    "a width in a field": "{{ '{0:{1}}'.format(1, 1500000000) }}",
    "an indented document": "{{ [1] | tojson(indent=1500000000) }}",
    "joined ranges": "{% set t = range(99999) | join('a' * 999999) %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a long answer": "{% for a in range(99999) %}{% for b in range(99999) %}texts{% endfor %}{% endfor %}",
}
SOON = msgspec.structs.replace(QUICK, render_s=0.3)


def for_models(*names: str) -> Assignment:
    offers = (Offer((name,), ModelInfo(name, "r", CONTEXT, 402, frozenset({0})), True) for name in names)
    return Assignment("chat", Menu(tuple(offers), False))


def chat(model: str = "tiny", text: str = "hi") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "seed": 1}).encode()


@pytest.mark.deep
async def test_a_template_has_bounds_however_it_is_written(tmp_path: Path, pools: Pools) -> None:
    template = "{% set told = messages[0].content %}" + "".join(
        f"{{% if told == '{name}' %}}{source}{{% endif %}}" for name, source in SPELLINGS.items()
    )
    directory = byte_level_tokenizer(tmp_path, template=template + "{{ told }}").directory
    async with pools(directory, quick=SOON) as pool:
        for spelling in SPELLINGS:
            with pytest.raises(ApiError) as told:
                await pool.prepare(EVIL, for_models("tiny"), chat(text=spelling))
            assert told.value.status == 400
            assert told.value.code in ("request_too_complex", "chat_template_error")
        assert await pool.prepare(EVIL, for_models("tiny"), chat())


async def test_a_template_that_takes_too_long_is_told_by_its_own_error(
    tmp_path: Path, pools: Pools, registry: CollectorRegistry
) -> None:
    directory = byte_level_tokenizer(tmp_path, template=ENDLESS).directory
    async with pools(directory, quick=SOON) as pool:
        with pytest.raises(ApiError, match=r"chat template takes more than 0\.3 s") as told:
            await pool.prepare(EVIL, for_models("tiny"), chat())
        assert told.value.param == "messages"
    assert registry.get_sample_value("baton_preparation_processes_lost_total", {"reason": "template"}) == 1


LOOPS_IF_TOLD = "{{ messages[0].content }}{% if 'loop' in messages[0].content %}" + ENDLESS + "{% endif %}"


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_template_that_loops_stops_no_other_tenant_or_model(
    keyed: bool, tmp_path: Path, pools: Pools
) -> None:
    """With keys another tenant's chats go on, of the same model too; without them those of another model."""
    bad = byte_level_tokenizer(tmp_path / "bad", template=LOOPS_IF_TOLD).directory
    good = byte_level_tokenizer(tmp_path / "good", template=TOOL_TEMPLATE).directory
    menu = for_models("bad", "good")
    async with pools(bad, good, keyed=keyed, quick=msgspec.structs.replace(QUICK, render_s=5.0)) as pool:
        await pool.start()
        await until(lambda: pool._ready.count == 2, 60)
        loops = [asyncio.create_task(pool.prepare(EVIL, menu, chat("bad", "loop"))) for _ in range(6)]
        await asyncio.sleep(0.1)
        for _ in range(5):
            assert await pool.prepare(ACME, menu, chat("bad" if keyed else "good"))
        assert not any(loop.done() for loop in loops)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


@pytest.mark.parametrize(
    ("template", "does"),
    [(ENDLESS, r"takes more than 0\.3 s"), (SPELLINGS["a width in a field"], "takes too much memory")],
)
async def test_chats_are_refused_if_the_template_fails_its_trial(
    template: str, does: str, tmp_path: Path, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    bad = byte_level_tokenizer(tmp_path / "bad", template=template).directory
    good = byte_level_tokenizer(tmp_path / "good", template=TOOL_TEMPLATE).directory
    async with pools(bad, good, quick=SOON) as pool:
        await pool.start()
        await until(lambda: "chats are refused" in caplog.text, 60)
        assert str(bad) in caplog.text
        menu = for_models("bad", "good")
        with pytest.raises(ApiError, match=f"The chat template of the model model 0 {does}") as told:
            await pool.prepare(ACME, menu, chat("bad"))
        assert (told.value.status, told.value.code) == (400, "chat_template_error")
        assert await pool.prepare(ACME, menu, chat("good"))
        completion = Assignment("completion", menu.menu)
        assert await pool.prepare(ACME, completion, b'{"model": "bad", "prompt": "a", "seed": 1}')


async def test_a_template_that_fails_its_trial_by_an_error_is_told_in_the_log(
    tmp_path: Path, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = "{{ raise_exception('no system message') }}"
    directory = byte_level_tokenizer(tmp_path, template=refuses).directory
    async with pools(directory) as pool:
        await pool.start()
        await until(lambda: "no system message" in caplog.text, 60)
        assert str(directory) in caplog.text
