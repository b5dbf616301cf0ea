"""The page's requests and playground in a browser, before a ring of real processes that asks for keys."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.router.security.keys import entry_line, new_key
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.ring import Ring, running_ring

pytestmark = [
    pytest.mark.beside,
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the page's requests are NOT tested"),
]

KEYS = {name: new_key() for name in ("acme", "other", "root")}
QUESTION = "What is a KV cache?"
PHASES = """[...document.querySelectorAll('.phases tr.phase')].map((row) =>
  ['.start', '.took', '.name'].map((cell) => row.querySelector(cell).textContent))"""
LISTED = "[...document.querySelectorAll('.request-list tbody a')].map((link) => link.title)"
ANSWER = "document.querySelector('.turn.assistant .text')?.textContent ?? ''"
OVER = "document.querySelectorAll('.turn.assistant[aria-busy=false]').length"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = tmp_path_factory.mktemp("page")
    lines = [entry_line(key, name, name) for name, key in KEYS.items()]
    lines[2] = lines[2].replace('"tenant"', '"operator": true, "tenant"')
    keys = folder / "keys.yaml"
    keys.write_text("\n".join(["keys:", *lines]))
    with running_ring(folder / "ring", router_options=("--api-keys", str(keys))) as started:
        yield started


def ask(ring: Ring, key: str, path: str, body: dict[str, object] | None = None) -> Any:
    """The answer's JSON, with the id under which the request can be explained."""
    headers = {"authorization": f"Bearer {KEYS[key]}", "content-type": "application/json"}
    sent = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(ring.url + path, sent, headers), timeout=30) as answer:
        return json.load(answer)


def complete(ring: Ring, key: str, number: int, **more: object) -> str:
    prompt = [(7 * i + number) % 200 + 3 for i in range(400)]
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, **more}
    return str(ask(ring, key, "/v1/completions", body)["id"])


def explained(ring: Ring, request_id: str) -> str:
    argv = [sys.executable, "-m", "baton", "explain", request_id, "--url", ring.url]
    argv += ["--api-key", KEYS["root"]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


@asynccontextmanager
async def viewing(ring: Ring, profile: Path, key: str, view: str) -> AsyncIterator[Page]:
    """The page with a key, as somebody has it who gave the key before."""
    async with browsing(profile) as page:
        await page.run_first(f"sessionStorage.setItem('baton-key', {json.dumps(KEYS[key])})")
        await page.open(f"{ring.url}/ui#{view}")
        await page.until(f"!!document.querySelector('.{view.partition('/')[0]}, .one-request')")
        yield page
        loaded = await page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
        assert loaded and all(name.startswith(f"{ring.url}/") for name in loaded), "nothing from elsewhere"


async def press(page: Page, key: str, code: int) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)


async def fill(page: Page, name: str, value: str) -> None:
    await page.evaluate(f"""(() => {{
      const field = document.querySelector('.playground [name="{name}"]');
      field.value = {json.dumps(value)};
      field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input", {{ bubbles: true }}));
    }})()""")
    await page.until(f"document.querySelector('.playground [name=\"{name}\"]').value !== ''")


async def send(page: Page, text: str) -> None:
    await fill(page, "prompt", text)
    await page.until("!document.querySelector('.send').disabled")
    await page.evaluate("document.querySelector('.send').click()")


async def test_a_waterfall_is_what_explain_says(ring: Ring, tmp_path: Path) -> None:
    await asyncio.to_thread(complete, ring, "acme", 1)
    request_id = await asyncio.to_thread(complete, ring, "acme", 2, n=2)
    async with viewing(ring, tmp_path / "profile", "root", "requests") as page:
        await page.until(f"{LISTED}.includes('{request_id}')")
        await page.evaluate(f"document.querySelector('a[title=\"{request_id}\"]').focus()")
        await press(page, "Enter", 13)
        await page.until("document.querySelectorAll('.phases').length === 2")
        said = await asyncio.to_thread(explained, ring, request_id)
        lines = re.findall(r"^ +([\d.]+) \+ +([\d.]+) ms  (\S+) ", said, re.MULTILINE)
        shown = await page.evaluate(PHASES)
        assert [each[1:] for each in shown] == [list(each[1:]) for each in lines] and len(lines) > 20
        for mine, theirs in zip(shown, lines, strict=True):  # halves are rounded either way
            assert float(mine[0]) == pytest.approx(float(theirs[0]), abs=0.1)
        text = await page.evaluate("document.querySelector('.trace').textContent")
        for sums in re.findall(r"^choice \d: (.+)$", said, re.MULTILINE):
            assert sums in text
        [cost, *_] = re.findall(r"chosen .+: cost ([\d.]+) ms", said)
        chosen = "[...document.querySelectorAll('.ways .chosen td')].map((cell) => cell.textContent)"
        assert cost in await page.evaluate(chosen)
        [handoff, *_] = re.findall(r"handoff over \w+, in ms: (.+)$", said, re.MULTILINE)
        assert handoff in await page.evaluate("document.querySelector('.handoff-note').textContent")
        await press(page, "Escape", 27)
        await page.until(f"document.activeElement.title === '{request_id}'")
        assert not page.errors


async def test_a_list_shows_what_its_filters_select(ring: Ring, tmp_path: Path) -> None:
    done = await asyncio.to_thread(complete, ring, "acme", 3)
    others = await asyncio.to_thread(complete, ring, "other", 4)
    async with viewing(ring, tmp_path / "profile", "root", "requests") as page:
        await page.until(f"{LISTED}.includes('{done}') && {LISTED}.includes('{others}')")
        later = await asyncio.to_thread(complete, ring, "acme", 5)
        await page.until(f"{LISTED}[0] === '{later}'")
        for label, value, inside, outside in (
            ("tenant", "other", others, done),
            ("tenant", "", done, "nothing"),
            ("TTFT", "100000", None, done),
        ):
            field = f"""[...document.querySelectorAll('.filters label')]
              .find((each) => each.textContent.startsWith('{label}')).querySelector('input')"""
            await page.evaluate(f"""(() => {{ const field = {field}; field.value = '{value}';
              field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()""")
            await page.until(f"!{LISTED}.includes('{outside}')")
            if inside is not None:
                await page.until(f"{LISTED}.includes('{inside}')")
        assert not page.errors


async def test_a_tenants_key_shows_only_its_own(ring: Ring, tmp_path: Path) -> None:
    theirs = await asyncio.to_thread(complete, ring, "acme", 6)
    own = await asyncio.to_thread(complete, ring, "other", 7)
    async with viewing(ring, tmp_path / "profile", "other", "requests") as page:
        await page.until(f"{LISTED}.includes('{own}')")
        listed = await page.evaluate(LISTED)
        assert theirs not in listed
        for each in listed:
            assert (await asyncio.to_thread(ask, ring, "root", f"/debug/requests/{each}"))[
                "tenant"
            ] == "other"
        await page.evaluate(f"location.hash = '#requests/{own}'")
        await page.until("document.querySelectorAll('.phases tr.phase').length > 8")
        assert await page.evaluate("document.querySelectorAll('.ways, .workers, .attempt code').length") == 0
        assert not page.errors
        await page.evaluate(f"location.hash = '#requests/{theirs}'")
        await page.until("!!document.querySelector('.trace-gone')")
        gone = await page.evaluate("document.querySelector('.trace-gone').textContent")
        assert gone.startswith("Nothing is known of request")
        assert len(page.errors) == 1 and "404" in page.errors[0], "what the browser itself says"


async def test_a_chat_streams_and_shows_its_log_probabilities(ring: Ring, tmp_path: Path) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3}
    expected = await asyncio.to_thread(ask, ring, "acme", "/v1/chat/completions", body)
    [choice] = expected["choices"]
    async with viewing(ring, tmp_path / "profile", "acme", "playground") as page:
        await fill(page, "temperature", "0")
        await fill(page, "logprobs", "3")
        await send(page, QUESTION)
        await page.until(f"{OVER} === 1")
        assert await page.evaluate(ANSWER) == choice["message"]["content"]
        figures = "[...document.querySelectorAll('.answer-figures dt')].map((each) => each.textContent)"
        assert await page.evaluate(figures) == ["TTFT", "ITL", "tokens/s", "prompt", "answer"]
        await page.evaluate("document.querySelector('.answer-tabs button').click()")
        await page.until("!!document.querySelector('.token')")
        tokens = choice["logprobs"]["content"]
        shown = await page.evaluate(
            "[...document.querySelectorAll('.token')].map((each) => each.textContent.replaceAll('⏎', ''))"
        )
        assert shown == [each["token"] for each in tokens]
        await page.evaluate("document.querySelector('.token-list').focus()")
        await press(page, "ArrowRight", 39)
        await page.until("document.querySelectorAll('.token')[1].ariaSelected === 'true'")
        odds = await page.evaluate(
            "[...document.querySelectorAll('.alternatives tr')].map((row) => row.lastChild.textContent)"
        )
        assert odds == [f"{each['logprob']:.3f}" for each in tokens[1]["top_logprobs"]]
        await page.evaluate("document.querySelector('.answer-tabs a').click()")
        await page.until("document.querySelectorAll('.phases tr.phase').length > 8")
        assert not page.errors


async def test_an_answer_grows_and_stops(ring: Ring, tmp_path: Path) -> None:
    async with viewing(ring, tmp_path / "profile", "acme", "playground") as page:
        await fill(page, "extra", json.dumps({"ignore_eos": True, "max_tokens": 3000}))
        await send(page, QUESTION)
        lengths: list[int] = []
        while len(set(lengths)) < 5:
            assert await page.evaluate(OVER) == 0, "it came at once"
            lengths.append(len(await page.evaluate(ANSWER)))
            await asyncio.sleep(0.02)
        assert lengths == sorted(lengths)
        await page.evaluate("document.querySelector('.stop').click()")
        await page.until("document.querySelector('.answer-state')?.textContent === 'stopped'")
        stopped = await page.evaluate(ANSWER)
        request_id = await page.evaluate("document.querySelector('.answer-tabs a').hash.split('/')[1]")
        for _ in range(100):
            told = await asyncio.to_thread(ask, ring, "acme", f"/debug/requests/{request_id}")
            if told["outcome"] == "cancelled":
                break
            await asyncio.sleep(0.05)
        assert told["outcome"] == "cancelled" and told["completion_tokens"] < 3000
        assert await page.evaluate(ANSWER) == stopped and not page.errors


def object_of(name: str, value: str) -> dict[str, object]:
    """The schema of an object with one value."""
    properties = {name: {"enum": [value]}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


async def test_calls_of_tools_and_the_form_of_an_answer_are_shown(ring: Ring, tmp_path: Path) -> None:
    city = object_of("city", "Ulm")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": city}}]
    schema = {"name": "form", "schema": object_of("kind", "<b>")}
    async with viewing(ring, tmp_path / "profile", "acme", "playground") as page:
        await fill(page, "tools", json.dumps(tools))
        await fill(page, "extra", json.dumps({"tool_choice": "required", "max_tokens": 200}))
        await send(page, "How warm is it in Ulm?")
        await page.until(f"{OVER} === 1")
        call = await page.evaluate("document.querySelector('.call').textContent")
        assert "get_weather" in call and '"city": "Ulm"' in call
        await page.until("!!document.querySelector('[aria-label=\"results of tools\"]')")
        await page.evaluate("document.querySelector('.clear').click()")
        await page.until("!document.querySelector('.turn')")
        for name in ("tools", "extra"):
            await fill(page, name, " ")
        form = {"type": "json_schema", "json_schema": schema}
        await fill(page, "response_format", json.dumps(form))
        await send(page, "Which?")
        await page.until(f"{OVER} === 1")
        answer = await page.evaluate("document.querySelector('.choice-view .json').textContent")
        assert json.loads(answer) == {"kind": "<b>"} and not page.errors
        await fill(page, "response_format", "{")
        await send(page, "Which?")
        await page.until("document.querySelector('.compose .problem')?.textContent.includes('is not JSON')")
        await fill(page, "response_format", " ")
        await fill(page, "top_p", "7")
        await send(page, "Which?")
        await page.until(f"{OVER} === 2")
        said = await page.evaluate("[...document.querySelectorAll('.turn .problem')].at(-1).textContent")
        assert said.startswith("top_p"), said
        assert len(page.errors) == 1 and "400" in page.errors[0], "what the browser itself says"
