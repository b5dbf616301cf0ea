"""The live page in a browser, before a ring under load: what it shows is what the metrics say."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from baton.greeting.cluster_key import ClusterKeys
from baton.planner.switch_role import switch_role
from baton.process import ready
from tests.support.axe import serious_faults
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.ring import CLUSTER_KEY, Ring, Service, running, running_routers, scrape, simulated

pytestmark = pytest.mark.deep

VISIBLE_S = 2.0
"""The longest time until the page shows what has happened to a worker."""
FIGURES = """Object.fromEntries([...document.querySelectorAll('#figures dd')]
  .map((each) => [each.id, each.textContent.replaceAll(',', '')]))"""
ROWS = """[...document.querySelectorAll('SELECTOR tbody tr')]
  .map((row) => [...row.cells].map((cell) => cell.textContent.trim().replaceAll(',', '')))"""
NODES = """Object.fromEntries([...document.querySelectorAll('.ring [data-worker]')]
  .map((each) => [each.dataset.worker, each.dataset.role + ' ' + each.dataset.state]))"""
DATA = "fetch('ui/data').then((answer) => answer.json())"

Samples = Mapping[str, float]


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


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for key, value in samples.items()
        if (key == name or key.startswith(name + "{")) and all(each in key for each in wanted)
    )


def address_of(worker: Service) -> str:
    assert isinstance(worker.ready, ready.WorkerReady)
    return worker.ready.address


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    if CHROMIUM is None:
        warnings.warn("no Chromium: the live page is NOT tested (apt-get install chromium)", stacklevel=1)
        pytest.skip("no Chromium: the live page is NOT tested (apt-get install chromium)")
    tmp = tmp_path_factory.mktemp("ring")
    workers = [simulated(tmp, f"{role}-{n}", role) for role in ("prefill", "decode") for n in range(2)]
    targets = ("--slo-ttft", "30", "--slo-itl", "10")
    with running(workers), running_routers(tmp, "demo", {"router": workers}, targets) as rings:
        yield rings["router"]


@asynccontextmanager
async def page_of(ring: Ring, tmp_path: Path) -> AsyncIterator[Page]:
    """The page in a browser; at the end, it must have complained of nothing and asked no other host."""
    async with browsing(tmp_path / "profile") as page:
        await page.open(f"{ring.url}/ui")
        await page.until("document.querySelector('#token_rate')")
        yield page
        assert not page.errors
        assert page.asked, "no request was noted"
        elsewhere = [url for url in page.asked if not url.startswith((ring.url + "/", "data:"))]
        assert not elsewhere


async def show(page: Page, view: str) -> None:
    await page.evaluate(f"location.hash = '{view}'")
    await page.until(f"document.querySelector('nav [aria-current]').textContent.toLowerCase() === '{view}'")


async def rows(page: Page, selector: str) -> list[list[str]]:
    found: list[list[str]] = await page.evaluate(ROWS.replace("SELECTOR", selector))
    return found


async def test_the_page_shows_what_the_metrics_say(ring: Ring, tmp_path: Path) -> None:
    async with page_of(ring, tmp_path) as page:
        with load(ring):
            await page.until("Number(document.getElementById('token_rate').textContent) > 0", 30)
            before = await asyncio.to_thread(scrape, f"{ring.url}/metrics")
            generated = "document.getElementById('generated_tokens').textContent.replaceAll(',', '')"
            await page.until(f"Number({generated}) >= {total(before, 'baton_generated_tokens_total')}")
            shown = await page.evaluate(FIGURES)
            await page.until("document.querySelector('.handoff.flows .band')")
            after = await asyncio.to_thread(scrape, f"{ring.url}/metrics")
            for name in ("generated_tokens", "prompt_tokens"):
                metric = f"baton_{name}_total"
                assert total(before, metric) <= float(shown[name]) <= total(after, metric)
            assert 1 <= float(shown["in_flight"]) <= 4
            faults = {}
            for dark in (False, True):
                for view in ("ring", "memory", "latency", "requests", "playground"):
                    await page.appear(width=1200, height=1000, dark=dark)
                    await show(page, view)
                    faults[view, dark] = await serious_faults(page)
            assert not any(faults.values()), faults
        await asyncio.to_thread(ring.wait_idle)
        metrics = await settled(page, ring)
        await the_ring_is_that_of_the_metrics(page, ring, metrics)
        await memory_is_that_of_the_metrics(page, metrics)
        await latencies_are_those_of_the_metrics(page, metrics)


async def settled(page: Page, ring: Ring) -> Samples:
    """Nothing runs any more, and the page's first line is that of the metrics, which are returned."""
    await show(page, "ring")
    deadline = time.monotonic() + 10
    while True:
        found = await asyncio.to_thread(scrape, f"{ring.url}/metrics")
        held = total(found, "baton_worker_kv_blocks", state="held")
        expected = {
            "in_flight": total(found, "baton_requests_in_flight"),
            "waiting": total(found, "baton_admission_waiting_requests"),
            "open_handoffs": total(found, "baton_worker_handoffs_open"),
            "generated_tokens": total(found, "baton_generated_tokens_total"),
            "prompt_tokens": total(found, "baton_prompt_tokens_total"),
            "answers": total(found, "baton_choices_total"),
        }
        texts = {name: f"{value:.0f}" for name, value in expected.items()}
        texts["kv_use"] = f"{held:.0f} of {total(found, 'baton_worker_kv_blocks'):.0f}"
        shown = await page.evaluate(FIGURES)
        if all(shown[name] == text for name, text in texts.items()):
            assert expected["in_flight"] == 0 and expected["generated_tokens"] > 0
            return found
        assert time.monotonic() < deadline, f"{texts}, but the page shows {shown}"
        await asyncio.sleep(0.2)


async def the_ring_is_that_of_the_metrics(page: Page, ring: Ring, metrics: Samples) -> None:
    states = await page.evaluate(NODES)
    assert states == {
        address_of(worker): f"{role} ready" for role in ("prefill", "decode") for worker in ring.of_role(role)
    }
    for address, *cells in await rows(page, "#workers"):
        figures = [total(metrics, "baton_worker_kv_blocks", worker=address, state=state) for state in BLOCKS]
        load = (
            "baton_worker_sequences_running",
            "baton_worker_sequences_waiting",
            "baton_worker_handoffs_open",
        )
        figures = [total(metrics, name, worker=address) for name in load] + figures
        assert cells[3:9] == [f"{figure:.0f}" for figure in figures], address
    received, handoffs = {}, 0.0
    for worker in ring.of_role("decode"):
        told = await asyncio.to_thread(worker.metrics)
        received[address_of(worker)] = total(told, "baton_handoff_received_bytes_total")
        handoffs += total(told, "baton_handoffs_completed_total")
    pairs = (await page.evaluate(DATA))["pairs"]
    for address, num_bytes in received.items():
        assert sum(pair["bytes"] for pair in pairs if pair["decode"] == address) == num_bytes > 0
    shown = await rows(page, "#pairs")
    assert sum(float(row[6]) for row in shown) == handoffs == sum(pair["handoffs"] for pair in pairs)
    assert all(row[2] == "0" for row in shown), "no handoff is open"


BLOCKS = ("held", "cached", "free")


async def memory_is_that_of_the_metrics(page: Page, metrics: Samples) -> None:
    await show(page, "memory")
    shares = {}
    for state in BLOCKS:
        blocks = total(metrics, "baton_worker_kv_blocks", state=state)
        shown = await page.evaluate(f"document.getElementById('kv-{state}').textContent.replaceAll(',', '')")
        assert shown == f"{blocks:.0f}"
        drawn = f"[...document.querySelectorAll('.cells .{state}')].map((path) => path.getAttribute('d'))"
        cells = "".join(await page.evaluate(drawn)).count("M")
        shares[state] = cells, blocks
    every = sum(cells for cells, _ in shares.values())
    blocks = sum(blocks for _, blocks in shares.values())
    for state, (cells, mine) in shares.items():
        assert cells / every == pytest.approx(mine / blocks, abs=0.01), f"{state}: {shares}"


def milliseconds(text: str) -> float:
    """Return what a duration of the page says, in milliseconds."""
    found = re.fullmatch(r"([\d.]+) (ms|s)", text)
    assert found is not None, text
    return float(found[1]) * (1000 if found[2] == "s" else 1)


async def latencies_are_those_of_the_metrics(page: Page, metrics: Samples) -> None:
    await show(page, "latency")
    stages = {row[0]: row[1:] for row in await rows(page, "[aria-labelledby=ttft-parts]")}
    mean_ttft = 0.0
    for stage in ("prepare", "admission", "placement", "prefill_queue", "prefill"):
        labels = {"role": "router", "stage": stage}
        number = total(metrics, "baton_request_stage_seconds_count", **labels)
        mean_ms = 1e3 * total(metrics, "baton_request_stage_seconds_sum", **labels) / number
        _, _, since_start, observed = stages[stage.replace("_", " ")]
        assert observed == f"{number:.0f}"
        assert milliseconds(since_start) == pytest.approx(mean_ms, rel=0.06, abs=0.006)
        mean_ttft += mean_ms
    first = "baton_time_to_first_token_seconds"
    assert mean_ttft == pytest.approx(1e3 * total(metrics, f"{first}_sum") / total(metrics, f"{first}_count"))
    gaps = total(metrics, "baton_inter_token_latency_seconds_count")
    counted = f"{DATA}.then(({{points}}) => points.flatMap((point) => point.itl).reduce((a, b) => a + b, 0))"
    await page.until(f"await {counted} === {gaps}", 5)  # the last point may still be to come
    data = await page.evaluate(DATA)
    assert (
        await page.evaluate("document.querySelectorAll('[aria-labelledby=itl-map] .heat[d*=M]').length")
    ) > 0
    ((tenant, waiting, open_requests, _, refused),) = await rows(page, "[aria-labelledby=queue]")
    assert (waiting, open_requests, refused) == ("0", "0", "0")
    tokens = sum(each["tokens"] for each in data["tenants"])
    assert tokens == total(
        metrics, "baton_admission_tokens_total", tenant=tenant if tenant != "everybody" else ""
    )
    met = {row[0]: row[2] for row in await rows(page, "[aria-labelledby=slo]")}
    assert met["met all targets"] == f"{total(metrics, 'baton_slo_requests_total', missed='none'):.0f}"


async def test_a_lost_worker_and_another_role_are_seen_at_once(ring: Ring, tmp_path: Path) -> None:
    async with page_of(ring, tmp_path) as page:
        turned, (killed, ended) = ring.of_role("prefill")[0], ring.of_role("decode")
        keys = ClusterKeys(CLUSTER_KEY.encode())
        switched = await switch_role(address_of(turned), "decode", keys)
        assert (switched.was, switched.now) == ("prefill", "decode")
        await seen(page, turned, "decode ready")
        await page.until("document.querySelector('.changes').textContent.includes('prefill to decode')", 2)
        killed.kill()
        await seen(page, killed, "decode lost")
        await page.until("document.querySelector('.changes').textContent.includes('lost')", 2)
        ended.process.terminate()
        await page.until(f"{drawn(ended)}.state === 'drained'")
        state = await page.evaluate("document.getElementById('state').textContent.trim()")
        assert state == "live, 2 of 4 workers ready"


def drawn(worker: Service) -> str:
    """Return the expression of what the drawing says of a worker."""
    return f"document.querySelector('.ring [data-worker=\"{address_of(worker)}\"]').dataset"


async def seen(page: Page, worker: Service, state: str) -> None:
    """The page shows a worker in this state within the time that is promised."""
    began = time.monotonic()
    await page.until(f"{drawn(worker)}.role + ' ' + {drawn(worker)}.state === '{state}'")
    assert time.monotonic() - began < VISIBLE_S


async def test_on_a_phone_nothing_is_cut_off(ring: Ring, tmp_path: Path) -> None:
    async with page_of(ring, tmp_path) as page:
        await page.appear(width=360, height=800)
        for view in ("ring", "memory", "latency"):
            await show(page, view)
            await asyncio.sleep(0.2)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
