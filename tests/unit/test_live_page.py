"""The live page: figures from the metrics, files from the package, and to tenants only what is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.keys import KeyFile, entry_line, new_key
from baton.router.shared.limits import Limits, Tenant
from baton.router.ui.changes import MAX_CHANGES, Changes
from baton.router.ui.files import PAGE_FILES
from baton.router.ui.history import MAX_PAIRS, MAX_POINTS, MAX_TENANTS, WINDOW, History, quantile
from baton.router.ui.totals import Totals, buckets_of, summed
from baton.telemetry.admission import AdmissionMetrics, AdmissionView, TenantView
from baton.telemetry.goodput import GoodputTargets
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from baton.telemetry.pairs import MAX_PAIRS as MAX_TALLIED
from baton.telemetry.pairs import HandoffTally, PairCounts, WorkerPair
from baton.telemetry.ring import RingSource, WorkerView
from baton.v1 import worker_pb2 as pb
from tests.support.api_server import serving_app
from tests.support.browser import CHROMIUM, browsing
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

INF = float("inf")
VIEW = WorkerView("w:1", "decode", True, False, 3, 2, 10, 5, 7, 1)
PREFILL = replace(VIEW, address="w:0", role="prefill")


def queue_of(registry: CollectorRegistry, **waiting: int) -> AdmissionMetrics:
    """Return the metrics of a queue in which these tenants wait, each with one request open."""
    admission = AdmissionMetrics(registry)
    tenants = [TenantView(name, number, 10 * number, 1) for name, number in waiting.items()]
    total = sum(waiting.values())
    admission.watch(lambda: AdmissionView(total, 10 * total, len(tenants), 0, 64), lambda: tenants)
    return admission


def history(
    metrics: RouterMetrics,
    views: Sequence[WorkerView] = (VIEW,),
    tally: HandoffTally | None = None,
    open_handoffs: dict[WorkerPair, int] | None = None,
    **waiting: int,
) -> History:
    told_of = tally or HandoffTally()
    source = RingSource("m", lambda: list(views), dict, lambda: told_of, lambda: open_handoffs or {})
    return History(metrics, [source], queue_of(metrics.registry, **waiting))


async def told(page: History, after: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(await page.document(after))
    return document


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, (0, 0, 0, 0), None),
        (0.5, (4, 4, 4, 4), 0.5),
        (0.5, (0, 10, 10, 10), 1.5),
        (0.99, (0, 0, 100, 100), 3.98),
        (0.5, (0, 0, 0, 8), 4.0),
        (0.25, (2, 4, 6, 8), 1.0),
    ],
)
def test_quantiles_are_prometheus_own(share: float, counts: tuple[int, ...], expected: float | None) -> None:
    bounds = (1.0, 2.0, 4.0, INF)
    before = tuple((bound, 100.0) for bound in bounds)
    after = tuple((bound, 100.0 + count) for bound, count in zip(bounds, counts, strict=True))
    assert quantile(share, before, after) == (expected if expected is None else pytest.approx(expected))


def test_the_first_observation_of_all_counts() -> None:
    assert quantile(0.5, (), ((1.0, 0.0), (2.0, 10.0), (INF, 10.0))) == pytest.approx(1.5)
    assert quantile(0.5, (), ()) is None


async def test_points_are_rates_and_quantiles_of_the_last_seconds_and_bounded() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    of_model = ModelMetrics(metrics, "demo")
    of_model.generated_tokens.inc(1000)  # before the page's time
    page = history(metrics, acme=3, lab=1)
    at = page._seen[0][0]
    for step in range(1, MAX_POINTS + 20):
        of_model.generated_tokens.inc(20)
        of_model.time_to_first_token.observe(0.3)
        of_model.inter_token_latency.observe(0.0035)
        page.tick(at + 2.0 * step, await page.totals())
    document = await told(page)
    points = document["points"]
    assert len(points) == MAX_POINTS
    assert points[-1]["token_rate"] == pytest.approx(10.0)
    assert 250 <= points[-1]["ttft_p50"] <= 500 and 3 <= points[-1]["itl_p50"] <= 4
    bucket = document["itl_bounds"].index(0.004)
    assert [at for at, many in enumerate(points[-1]["itl"]) if many] == [bucket]
    assert points[-1]["itl"][bucket] == 1, "of one tick, not of the window"
    assert len(points[-1]["itl"]) == len(document["itl_bounds"]) + 1
    assert points[-1]["tenants"] == {"acme": 3, "lab": 1} and document["waiting"] == 4
    assert document["generated_tokens"] == 1000 + 20 * (MAX_POINTS + 19)
    numbers = [point["number"] for point in points]
    assert numbers == sorted(set(numbers)) and document["number"] == numbers[-1]
    assert [each["number"] for each in (await told(page, numbers[-3]))["points"]] == numbers[-2:]
    page.tick(at + 2.0 * (MAX_POINTS + 19) + 1.0, await page.totals())
    newer = await told(page, numbers[-1])  # the rest of the document is that of half a second ago
    assert [each["number"] for each in newer["points"]] == [newer["number"]] > [numbers[-1]]
    for step in range(MAX_POINTS + 20, MAX_POINTS + 21 + WINDOW):
        page.tick(at + 2.0 * step, await page.totals())
    latest = (await told(page))["points"][-1]
    assert latest["token_rate"] == 0 and latest["ttft_p50"] is None and latest["itl_p50"] is None


async def test_the_first_token_is_taken_apart_as_the_stages_are_measured() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    page = history(metrics)
    for model in ("one", "other"):
        metrics.stages.of("router", model).observe({"prepare": 0.01, "prefill": 0.2})
    metrics.stages.of("prefill", "one").observe({"prefill": 9.0})  # a worker's own, of the same name
    page.tick(page._seen[0][0] + 2.0, await page.totals())
    document = await told(page)
    assert document["stages"]["prefill"] == {"number": 2, "seconds": pytest.approx(0.4)}
    assert list(document["stages"]) == ["prepare", "admission", "placement", "prefill_queue", "prefill"]
    stages = document["points"][-1]["stages"]
    assert stages["prefill"] == pytest.approx(200) and stages["prepare"] == pytest.approx(10)
    assert stages["admission"] is None, "nothing was observed"


async def test_goodput_is_told_by_what_was_missed() -> None:
    targets = GoodputTargets(ttft=2.0)
    metrics = RouterMetrics(CollectorRegistry(), targets)
    page = history(metrics)
    for missed, cause in (("none", ""), ("none", ""), ("ttft", "prefill_queue")):
        metrics.goodput.ended("m", missed, cause)  # type: ignore[arg-type]
    page.tick(page._seen[0][0] + 2.0, await page.totals())
    document = await told(page)
    assert document["targets"] == {"ttft": 2.0, "itl": None}
    assert document["slo"] == {"none": 2, "ttft prefill_queue": 1}
    assert document["points"][-1]["slo"] == {"none": 1.0, "ttft": 0.5, "itl": 0, "error": 0}


def handoff(num_bytes: int, transfer_us: int = 2000) -> pb.Phases:
    phases = pb.HandoffPhases(flush_us=1000, commit_us=500, transfer_us=transfer_us, bytes=num_bytes)
    return pb.Phases(request_id="r", attempt=1, handoff=phases)


async def test_handoffs_are_told_by_pair() -> None:
    tally, pair = HandoffTally(), WorkerPair("w:0", "w:1")
    page = history(
        RouterMetrics(CollectorRegistry()), [PREFILL, VIEW], tally, {pair: 3, WorkerPair("w:0", "gone"): 1}
    )
    began = page._seen[0][0]
    for _ in range(4):
        tally.tell(pair, handoff(1_000_000))
        tally.tell(pair, pb.Phases(join=pb.JoinPhases(queue_us=3000, step_us=20_000)))
    tally.tell(WorkerPair("w:0", "gone"), handoff(5))
    page.tick(began + 2.0, await page.totals())
    tally.tell(pair, handoff(1_000_000))
    document = await told(page)
    (shown,) = document["pairs"]
    assert {name: shown[name] for name in ("prefill", "decode", "open", "handoffs", "bytes")} == {
        "prefill": "w:0",
        "decode": "w:1",
        "open": 3,
        "handoffs": 5,
        "bytes": 5_000_000,
    }
    assert shown["bytes_per_s"] == pytest.approx(5_000_000 / (page._made - began))
    assert shown["transfer_ms"] == pytest.approx(2.0)
    assert document["handoff"]["first_step"] == {"number": 4, "seconds": pytest.approx(0.08)}
    assert document["points"][-1]["handoff"]["queue"] == pytest.approx(3.0)
    assert document["handoff"]["flush"]["number"] == 6, "of all pairs, also of workers that are gone"
    assert len((await page.totals()).pairs) == 1, "the others are not sent between processes"


async def test_only_the_busiest_pairs_are_told() -> None:
    tally = HandoffTally()
    views = [replace(PREFILL, address=f"p:{n}") for n in range(20)]
    views += [replace(VIEW, address=f"d:{n}") for n in range(20)]
    for number in range(400):
        tally.tell(WorkerPair(f"p:{number // 20}", f"d:{number % 20}"), handoff(1 + number))
    document = await told(history(RouterMetrics(CollectorRegistry()), views, tally))
    assert len(document["pairs"]) == MAX_PAIRS and document["pairs_left_out"] == 400 - MAX_PAIRS


async def test_only_the_busiest_tenants_are_told() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    most = MAX_TENANTS
    waiting = {f"t{number}": number for number in range(1, most + 1)} | {"idle": 0, "busy": 0}
    page = History(metrics, [], queue_of(metrics.registry, **waiting))
    page._admission.admitted_tokens.labels("busy").inc(10)
    page._admission.admitted_tokens.labels("t1").inc(5)
    page.tick(page._seen[0][0] + 2.0, await page.totals())
    document = await told(page)
    names = [each["tenant"] for each in document["tenants"]]
    assert names == [f"t{number}" for number in range(most, 0, -1)] and document["tenants_left_out"] == 2
    assert document["points"][-1]["tenants"].keys() == set(names)
    own = orjson.loads(await page.document_of("busy"))
    assert own["tenants"][0]["tokens"] == 10, "what an operator's page leaves out"


async def test_a_tenants_document_does_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    page = history(RouterMetrics(CollectorRegistry()), acme=1)
    tell, made = page._tell, 0

    def counted(now: float, totals: Totals) -> dict[str, object]:
        nonlocal made
        made += 1
        return tell(now, totals)

    monkeypatch.setattr(page, "_tell", counted)
    await page.document_of("acme")
    assert made == 0
    assert (await told(page))["workers"] == (await told(page))["workers"] != [] and made == 1


async def test_one_answer_serves_the_other_processes_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    page, of_model = history(metrics), ModelMetrics(metrics, "m")
    first = await page._tell_totals(b"")
    of_model.generated_tokens.inc()
    assert await page._tell_totals(b"") is first
    monkeypatch.setattr("baton.router.ui.history.FRESH_S", 0.0)
    later = msgspec.msgpack.decode(await page._tell_totals(b""), type=Totals)
    assert later.generated_tokens == 1


async def test_the_busiest_pair_is_first() -> None:
    tally = HandoffTally()
    views = [PREFILL, VIEW, replace(VIEW, address="w:2")]
    page = history(RouterMetrics(CollectorRegistry()), views, tally)
    tally.tell(WorkerPair("w:0", "w:1"), handoff(10))
    tally.tell(WorkerPair("w:0", "w:2"), handoff(20))
    assert [pair["decode"] for pair in (await told(page))["pairs"]] == ["w:2", "w:1"]


def test_pairs_are_bounded() -> None:
    tally = HandoffTally()
    for number in range(MAX_TALLIED + 1):
        tally.tell(WorkerPair("p", f"d:{number}"), handoff(1))
    assert len(tally.counts) == MAX_TALLIED and WorkerPair("p", "d:0") not in tally.counts
    assert tally.total.handoffs == tally.total.bytes == MAX_TALLIED + 1


async def test_several_processes_add_up() -> None:
    pages = []
    for number in (1, 2):
        metrics = RouterMetrics(CollectorRegistry())
        ModelMetrics(metrics, "m").generated_tokens.inc(10 * number)
        metrics.stages.of("router", "m").observe({"prefill": 0.1 * number})
        metrics.goodput.ended("m", "none", "")
        tally = HandoffTally()
        tally.tell(WorkerPair("w:0", "w:1"), handoff(number))
        pages.append(history(metrics, [PREFILL, VIEW], tally, acme=number))
    both = summed([await page.totals() for page in pages])
    assert both.generated_tokens == 30 and both.slo == {"none": 2}
    assert both.stages["prefill"].number == 2 and both.stages["prefill"].seconds == pytest.approx(0.3)
    assert both.tenants["acme"].waiting == 3 and both.tenants["acme"].open == 2
    (pair,) = both.pairs
    assert pair.counts == PairCounts(2, 3, 0.004, 0.002, 0.001)


async def test_one_document_serves_all_pages_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def views() -> list[WorkerView]:
        nonlocal looks
        looks += 1
        return [VIEW]

    metrics = RouterMetrics(CollectorRegistry())
    page = History(metrics, [RingSource("m", views, dict)], queue_of(metrics.registry))
    await page.document()
    first = looks
    for _ in range(10):
        await page.document()
    assert looks == first
    monkeypatch.setattr("baton.router.ui.history.FRESH_S", 0.0)
    await page.document()
    assert looks > first


def test_changes_of_workers_are_told_once() -> None:
    changes = Changes()

    def look(*views: WorkerView) -> list[str]:
        before = len(changes.latest)
        changes.look(views, 1.0)
        return [f"{each.worker} {each.what}" for each in list(changes.latest)[before:]]

    gone = replace(VIEW, ready=False, role="unknown")
    assert look(PREFILL, VIEW) == [], "what is there when the router starts is no change"
    assert look(PREFILL, VIEW) == []
    assert look(PREFILL, gone) == ["w:1 lost"]
    assert changes.role_of(gone) == "decode", "its last one"
    assert look(PREFILL, VIEW) == ["w:1 ready, decode"]
    assert look(PREFILL, replace(VIEW, draining=True)) == ["w:1 draining"]
    assert look(PREFILL, replace(gone, drained=True)) == ["w:1 left, drained"]
    assert look(PREFILL, replace(VIEW, role="prefill")) == ["w:1 decode to prefill"]
    assert look(PREFILL, replace(VIEW, role="prefill", ejected=True)) == ["w:1 ejected"]
    assert look(PREFILL, replace(VIEW, role="prefill")) == ["w:1 back from ejection"]
    assert look(PREFILL) == ["w:1 gone"]
    assert look(PREFILL, VIEW) == ["w:1 known, decode"]
    for _ in range(MAX_CHANGES):
        look(PREFILL, gone)
        look(PREFILL, VIEW)
    assert len(changes.latest) == MAX_CHANGES


def test_buckets_add_up_over_labels() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for model in ("one", "other"):
        metrics.inter_token_latency.labels(model).observe(0.0035)
    found = buckets_of(metrics.inter_token_latency)
    assert [bound for bound, _ in found] == sorted(bound for bound, _ in found)
    assert found[-1] == (INF, 2.0)


def test_the_tenants_of_several_queues_add_up() -> None:
    registry = CollectorRegistry()
    admission = queue_of(registry, acme=2)
    view = TenantView("acme", 3, 30, 1)
    admission.watch(lambda: AdmissionView(3, 30, 1, 0, 64), lambda: [view])
    assert admission.tenants() == [TenantView("acme", 5, 50, 2)]
    value = registry.get_sample_value("baton_admission_tenant_waiting_requests", {"tenant": "acme"})
    assert value == 5 == registry.get_sample_value("baton_admission_waiting_requests")


async def test_the_page_is_open_and_its_figures_are_their_tenants(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("acme", "root")}
    lines = [entry_line(key, name, name) for name, key in keys.items()]
    lines[1] = lines[1].replace('"tenant"', '"operator": true, "tenant"')
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(["keys:", *lines]))
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]),
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        metrics,
        authentication=Authentication(KeyFile(str(file), Limits()).find, Tenant()),
    )
    app = app_for(service, history=history(metrics, acme=2, lab=7))
    async with serving_app(app) as url, httpx.AsyncClient(base_url=url) as http:
        for path, page_file in PAGE_FILES.items():
            answer = await http.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"] == page_file.kind
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
        assert (await http.get("/ui/data")).status_code == 401
        answers = {}
        for who, key in keys.items():
            answers[who] = await http.get("/ui/data", headers={"authorization": f"Bearer {key}"})
            assert answers[who].status_code == 200 and answers[who].headers["cache-control"] == "no-store"
            given = await http.get("/ui/data?after=x", headers={"authorization": f"Bearer {key}"})
            assert given.status_code == 400 and "after must be the number of a point" in given.text
        assert answers["root"].json()["workers"][0]["address"] == "w:1"
        assert {each["tenant"] for each in answers["root"].json()["tenants"]} == {"acme", "lab"}
        own = answers["acme"].json()
        assert own.keys() == {"operator", "tenants", "every_s"} and own["operator"] is False
        assert [(each["tenant"], each["waiting"]) for each in own["tenants"]] == [("acme", 2)]
        assert "lab" not in answers["acme"].text and "w:1" not in answers["acme"].text


async def test_no_other_file_is_served(tmp_path: Path) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics
    )
    async with serving_app(app_for(service, history=history(metrics))) as url:
        for path in ("/ui/", "/ui/vendor/LICENSES", "/ui/../history.py", "/ui/%2e%2e/history.py", "/ui/x.js"):
            reader = httpx.Request("GET", url + "/x")
            reader.url = reader.url.copy_with(raw_path=path.encode())
            async with httpx.AsyncClient() as http:
                assert (await http.send(reader)).status_code in (307, 404), path


def test_the_pages_files_name_no_other_host() -> None:
    assert {"/ui", "/ui/page.js", "/ui/page.css", "/ui/vendor/preact-htm.js"} < PAGE_FILES.keys()
    for path, page_file in PAGE_FILES.items():
        text = page_file.content().decode().replace("http://www.w3.org/", "")  # names of formats, never asked
        assert "http://" not in text and "https://" not in text, path
        assert "style=" not in text, f"{path}: the policy forbids styles in markup"


async def test_without_the_option_there_is_no_page(tmp_path: Path) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics
    )
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/ui")).status_code == 404
        assert (await http.get("/ui/data")).status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the live page is NOT tested")
async def test_the_page_asks_for_a_key_and_shows_a_tenant_its_own(tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{entry_line(key, 'ci', 'acme')}")
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(KeyFile(str(file), Limits()).find, Tenant())
    service = CompletionService(
        FakeRing(lambda call: [70]),
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        metrics,
        authentication=authentication,
    )
    app = app_for(service, history=history(metrics, acme=2, lab=7))
    async with serving_app(app) as url, browsing(tmp_path / "browser") as page:
        await page.open(f"{url}/ui#ring")
        for given in ("baton-wrong", key):
            await page.until("document.activeElement.id === 'key-field'")
            await page.evaluate(f"document.activeElement.value = {given!r}")
            await page.evaluate("document.getElementById('key').requestSubmit()")
            if given != key:
                await page.until("document.querySelector('#key [role=alert]')")
        await page.until("document.querySelector('#tenant')?.textContent === 'acme'")
        assert await page.evaluate("document.getElementById('waiting').textContent") == "2"
        links = "[...document.querySelectorAll('nav a')].map((link) => link.textContent)"
        assert await page.evaluate(links) == ["Requests", "Playground"]
        assert await page.evaluate("document.getElementById('key')") is None
        assert all("401" in each for each in page.errors) and len(page.errors) == 2, "asked once for each key"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the live page is NOT tested")
async def test_a_forgotten_keys_answer_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    file = tmp_path / "keys.yaml"
    entry = entry_line(key, "ops", "root").replace('"tenant"', '"operator": true, "tenant"')
    file.write_text(f"keys:\n{entry}")
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(KeyFile(str(file), Limits()).find, Tenant())
    service = CompletionService(
        FakeRing(lambda call: [70]),
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        metrics,
        authentication=authentication,
    )
    shown = history(metrics)
    tell, asked, go_on = shown.document, asyncio.Event(), asyncio.Event()

    async def slow(after: int = 0) -> bytes:
        document = await tell(after)
        asked.set()
        await go_on.wait()
        return document

    async with serving_app(app_for(service, history=shown)) as url, browsing(tmp_path / "browser") as page:
        await page.open(f"{url}/ui#requests/%")
        await page.until("document.activeElement.id === 'key-field'")
        await page.evaluate(f"document.activeElement.value = {key!r}")
        await page.evaluate("document.getElementById('key').requestSubmit()")
        await page.until("document.querySelector('.requests h2')?.textContent === 'Requests'")
        monkeypatch.setattr(shown, "document", slow)
        await asyncio.wait_for(asked.wait(), 10)
        await page.evaluate("document.querySelector('header button').click()")
        await page.until("!document.querySelector('#figures')")
        await page.evaluate("""new MutationObserver(() => {
          window.shown ||= document.querySelector("#figures") !== null;
        }).observe(document.body, { subtree: true, childList: true })""")
        go_on.set()
        await page.until("document.activeElement.id === 'key-field'")
        assert not await page.evaluate("window.shown")
        assert all("401" in each for each in page.errors), page.errors


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the live page is NOT tested")
async def test_who_gets_no_requests_does_not_count_as_ready(tmp_path: Path) -> None:
    views = [
        replace(VIEW, kv_groups=("full", "window 512"), blocks_findable=(12, 3)),
        replace(VIEW, address="w:2", draining=True),
        replace(VIEW, address="w:3", ejected=True),
        replace(VIEW, address="w:4", ready=False),
        replace(VIEW, address="w:5", ready=False, drained=True),
    ]
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics
    )
    shown = history(metrics, views)
    async with serving_app(app_for(service, history=shown)) as url, browsing(tmp_path / "browser") as page:
        await page.open(f"{url}/ui")
        state = "document.getElementById('state').textContent.trim()"
        await page.until(f"{state}.startsWith('live')")
        rows = "[...document.querySelectorAll('#workers tbody tr')].map((row) => row.cells[3].textContent)"
        assert await page.evaluate(rows) == ["ready", "draining", "ejected", "lost", "drained"]
        assert await page.evaluate(state) == "live, 1 of 5 workers ready"
        await page.evaluate("location.hash = 'memory'")
        groups = "[...document.querySelectorAll('.groups div')].map((each) => each.textContent.trim())"
        await page.until(f"{groups}.length")
        assert await page.evaluate(groups) == ["full 12 findable", "window 512 3 findable"]
        assert not page.errors
