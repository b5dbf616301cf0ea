"""The live page: its figures come from the metrics, and its files from the package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.security.keys import KeyFile, entry_line, new_key
from baton.router.shared.limits import Limits, Tenant
from baton.router.ui.files import PAGE_FILES
from baton.router.ui.history import MAX_POINTS, WINDOW, History, quantile
from baton.router.ui.totals import buckets_of
from baton.telemetry.admission import AdmissionMetrics, AdmissionView, TenantView
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from baton.telemetry.ring import RingSource, WorkerView
from tests.support.api_server import serving_app
from tests.support.browser import CHROMIUM, browsing
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

INF = float("inf")
VIEW = WorkerView("w:1", "decode", True, False, 3, 2, 10, 5, 7, 1)


def history(metrics: RouterMetrics) -> History:
    return History(metrics, [RingSource("m", lambda: [VIEW], dict)], lambda: 4)


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
    page = history(metrics)
    at = page._seen[0][0]
    for step in range(1, MAX_POINTS + 20):
        of_model.generated_tokens.inc(20)
        of_model.time_to_first_token.observe(0.3)
        page.tick(at + 2.0 * step, await page.totals())
    document = await page.document()
    points = document["points"]
    assert isinstance(points, list) and len(points) == MAX_POINTS
    assert points[-1]["token_rate"] == pytest.approx(10.0)
    assert 250 <= points[-1]["ttft_p50"] <= 500 and points[-1]["itl_p50"] is None
    assert document["generated_tokens"] == 1000 + 20 * (MAX_POINTS + 19)
    assert document["waiting"] == 4
    for step in range(MAX_POINTS + 20, MAX_POINTS + 21 + WINDOW):
        page.tick(at + 2.0 * step, await page.totals())
    latest = (await page.document())["points"][-1]
    assert latest["token_rate"] == 0 and latest["ttft_p50"] is None


def test_buckets_add_up_over_labels() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for model in ("one", "other"):
        metrics.inter_token_latency.labels(model).observe(0.0035)
    found = buckets_of(metrics.inter_token_latency)
    assert [bound for bound, _ in found] == sorted(bound for bound, _ in found)
    assert found[-1] == (INF, 2.0)


async def test_the_page_is_open_and_its_figures_are_for_operators(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("tenant", "root")}
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
    app = app_for(service, history=history(metrics))
    async with serving_app(app) as url, httpx.AsyncClient(base_url=url) as http:
        for path, (_, kind) in FILES.items():
            answer = await http.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"] == kind
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
            assert "http://" not in answer.text and "https://" not in answer.text, "nothing from elsewhere"
        assert (await http.get("/ui/data")).status_code == 401
        statuses = {}
        for who, key in keys.items():
            answer = await http.get("/ui/data", headers={"authorization": f"Bearer {key}"})
            statuses[who] = answer.status_code
        assert statuses == {"tenant": 403, "root": 200}
        assert answer.json()["workers"][0]["address"] == "w:1"
        assert (await http.get("/ui/../metrics.js")).status_code in (401, 404)


async def test_without_the_option_there_is_no_page(tmp_path: Path) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics
    )
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/ui")).status_code == 404
        assert (await http.get("/ui/data")).status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the live page is NOT tested")
async def test_who_gets_no_requests_does_not_count_as_ready(tmp_path: Path) -> None:
    views = [
        VIEW,
        replace(VIEW, address="w:2", draining=True),
        replace(VIEW, address="w:3", ejected=True),
        replace(VIEW, address="w:4", ready=False),
    ]
    metrics = RouterMetrics(CollectorRegistry())
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics
    )
    shown = History(metrics, [RingSource("m", lambda: views, dict)], lambda: 0)
    async with serving_app(app_for(service, history=shown)) as url, browsing(tmp_path / "browser") as page:
        await page.open(f"{url}/ui")
        state = "document.getElementById('state').textContent"
        await page.until(f"{state}.startsWith('live')")
        rows = "[...document.querySelectorAll('#workers tr')].map((row) => row.cells[3].textContent)"
        assert await page.evaluate(rows) == ["ready", "draining", "ejected", "not ready"]
        assert await page.evaluate(state) == "live, 1 workers ready"
