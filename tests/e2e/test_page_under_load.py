"""The live page in a browser, before a ring under load: what it shows is what the metrics say."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import CHROMIUM, browsing
from tests.support.ring import Ring, running, running_routers, scrape, simulated

SHOWN = """Object.fromEntries([...document.querySelectorAll('dd')]
  .map((each) => [each.id, each.textContent]))"""
ROWS = """[...document.querySelectorAll('#workers tr')]
  .map((row) => [...row.cells].map((cell) => cell.textContent))"""
INK = """Object.fromEntries([...document.querySelectorAll('canvas')].map((canvas) => [canvas.id,
  canvas.getContext('2d').getImageData(0, 20, canvas.width, canvas.height - 24)
    .data.filter(Boolean).length]))"""


@contextmanager
def load(ring: Ring, clients: int = 4) -> Iterator[None]:
    """Clients that ask again and again."""
    over = threading.Event()

    def ask(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            prompt = [(7 * i + 31 * number + count) % 200 + 3 for i in range(300)]
            body = {"prompt": prompt, "max_tokens": 80, "stream": True, "ignore_eos": True}
            with closing(HTTPConnection(ring.url.removeprefix("http://"), timeout=60)) as connection:
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
                )
                connection.getresponse().read()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def metrics(ring: Ring) -> dict[str, float]:
    """As the page calls them."""
    found = scrape(f"{ring.url}/metrics")

    def total(name: str) -> float:
        return sum(value for key, value in found.items() if key == name or key.startswith(name + "{"))

    held = sum(value for key, value in found.items() if "worker_kv_blocks" in key and 'state="held"' in key)
    return {
        "in_flight": total("baton_requests_in_flight"),
        "waiting": total("baton_admission_waiting_requests"),
        "prompt_tokens": total("baton_prompt_tokens_total"),
        "generated_tokens": total("baton_generated_tokens_total"),
        "answers": total("baton_choices_total"),
        "open_handoffs": total("baton_worker_handoffs_open"),
        "held": held,
        "blocks": total("baton_worker_kv_blocks"),
    }


def test_the_page_shows_what_the_metrics_say(tmp_path: Path) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: the live page is NOT tested (apt-get install chromium)", stacklevel=1)
        pytest.skip("no Chromium: the live page is NOT tested (apt-get install chromium)")
    workers = [simulated(tmp_path, role, role) for role in ("prefill", "decode")]
    with running(workers), running_routers(tmp_path, "demo", {"router": workers}) as rings:
        asyncio.run(look(rings["router"], tmp_path))


async def look(ring: Ring, tmp_path: Path) -> None:
    async with browsing(tmp_path / "profile") as page:
        with load(ring):
            await asyncio.sleep(3)
            await page.open(f"{ring.url}/ui")
            await page.until("Number(document.getElementById('token_rate')?.textContent) > 0")
            before = await asyncio.to_thread(metrics, ring)
            tokens = before["generated_tokens"]
            await page.until(f"Number(document.getElementById('generated_tokens').textContent) >= {tokens}")
            shown, ink = await page.evaluate(SHOWN), await page.evaluate(INK)
            after = await asyncio.to_thread(metrics, ring)
            (tmp_path / "ui.png").write_bytes(await page.screenshot())
            for name in ("generated_tokens", "prompt_tokens"):
                assert before[name] <= float(shown[name]) <= after[name]
            assert 1 <= float(shown["in_flight"]) <= 4
            assert all(ink.values()), f"nothing is drawn: {ink}"
        await settled(page, ring)
        rows = await page.evaluate(ROWS)
        assert [row[:4] for row in rows] == [
            [worker.ready.address, worker.ready.role, "demo", "ready"]
            for worker in reversed(ring.workers)  # by role
        ]
        assert [row[4:7] for row in rows] == [["0", "0", "0"]] * 2
        assert not page.errors


async def settled(page: Any, ring: Ring) -> None:
    """Nothing runs any more, and the page says of everything what the metrics say."""
    found = await asyncio.to_thread(metrics, ring)
    expected = {name: str(round(found[name])) for name in ("in_flight", "waiting", "open_handoffs")}
    expected |= {name: str(round(found[name])) for name in ("generated_tokens", "prompt_tokens", "answers")}
    expected["kv_use"] = f"{found['held']:.0f} of {found['blocks']:.0f}"
    shown: dict[str, str] = {}
    for _ in range(100):
        shown = await page.evaluate(SHOWN)
        if all(shown[name] == value for name, value in expected.items()):
            assert expected["in_flight"] == "0" and float(expected["generated_tokens"]) > 0
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{expected}, but the page shows {shown}")
