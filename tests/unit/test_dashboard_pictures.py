"""Pictures of dashboards: every panel is drawn from its own queries, in its own units."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from scripts.dashboard_pictures.answers import Series, Source, Span
from scripts.dashboard_pictures.drawing import PALETTE, drawn
from scripts.dashboard_pictures.reading import Target, read
from scripts.dashboard_pictures.units import written
from tests.support.prometheus import DASHBOARDS

SECONDS = 10.0


def rising(target: Target) -> list[Series]:
    """Two series of each query, the buckets of heat maps among them."""
    name = re.sub(r"\{\{\s*(\w+)\s*\}\}", r"\1", target.legend)
    times = tuple(float(second) for second in range(int(SECONDS)))
    return [
        Series(f"{name} {edge}", {"le": edge}, times, tuple(scale * (1 + when) for when in times))
        for edge, scale in (("0.1", 0.001), ("+Inf", 0.005))
    ]


def texts(path: Path, ask: object = rising) -> list[str]:
    assert callable(ask)
    figure = drawn(read(path), ask, SECONDS)
    return [found.get_text() for found in figure.findobj(Text) if found.get_text()]


@pytest.mark.deep
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_asks_all_of_its_queries_and_is_drawn(path: Path) -> None:
    picture = read(path)
    asked: list[str] = []

    def ask(target: Target) -> list[Series]:
        asked.append(target.expression)
        return rising(target)

    said = texts(path, ask)
    document = json.loads(path.read_text())
    assert asked == [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    assert {panel["title"] for panel in document["panels"]} <= set(said)
    figures = [panel for panel in picture.panels if panel.kind == "timeseries"]
    legends = [text for text in said if "(max " in text]
    assert len(legends) >= 2 * len(figures)


def test_lines_lie_above_their_panels(tmp_path: Path) -> None:
    [path] = [path for path in DASHBOARDS if path.stem == "baton-cache"]
    file = tmp_path / "picture.png"
    drawn(read(path), rising, SECONDS).savefig(file)
    seen = np.round(255 * imread(file)[..., :3]).astype(int).reshape(-1, 3)
    for colour in PALETTE[:2]:
        wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
        assert (np.abs(seen - wanted).max(axis=1) < 12).sum() > 2000, colour


def test_legends_have_the_unit_of_the_panel() -> None:
    [path] = [path for path in DASHBOARDS if path.stem == "baton-decode"]
    said = texts(path)
    for figure in ("50 ms (max 50 ms)", "5% (max 5%)", "0.05 tokens/s (max 0.05 tokens/s)"):
        assert figure in said


def test_a_panel_without_data_says_what_it_needs() -> None:
    [path] = [path for path in DASHBOARDS if path.stem == "baton-cache"]
    needs = [panel for panel in read(path).panels if "Empty unless" in panel.description]
    said = texts(path, lambda target: [])
    assert said.count("No data") == len(read(path).panels)
    assert len([text for text in said if text.startswith("empty unless ")]) == len(needs)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.0123, "s", "12.3 ms"), (75.0, "s", "1.25 min"), (0.0, "s", "0 s"), (0.123, "percentunit", "12.3%"),
        (1234.0, "reqps", "1.23 k req/s"), (2_500_000.0, "Bps", "2.5 MB/s"), (3 * 2.0**20, "bytes", "3 MiB"),
        (999.7, "short", "1000"), (42.0, "suffix: tokens/s", "42 tokens/s"), (float("nan"), "s", "–"),
    ],
)  # fmt: skip
def test_figures_are_written_as_grafana_does(value: float, unit: str, said: str) -> None:
    assert written(value, unit) == said


def test_a_unit_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="furlongs"):
        written(1.0, "furlongs")


class FakePrometheus(BaseHTTPRequestHandler):
    """Answers one query with two series, of which one has no number at all, and refuses others."""

    def do_GET(self) -> None:
        query = parse_qs(urlparse(self.path).query)
        good = query["query"] == ['rate(a{model=~".*"}[15s])'] and query["step"] == ["1.0"]
        nan = {"metric": {"role": "prefill"}, "values": [[100.0, "NaN"]]}
        some = {"metric": {"role": "decode", "instance": "b:2"}, "values": [[100.0, "1"], [101.0, "NaN"]]}
        body = {"data": {"result": [nan, some]}} if good else {"error": "parse error"}
        self.send_response(200 if good else 400)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def source() -> Iterator[Source]:
    with HTTPServer(("127.0.0.1", 0), FakePrometheus) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield Source(url, Span(100.0, 110.0, 1.0), "15s", {"b:2": "decode-0"})
        server.shutdown()


def test_queries_are_put_as_grafana_does(source: Source) -> None:
    [series] = source.ask(Target('rate(a{model=~"$model"}[$__rate_interval])', "{{role}} on {{instance}}"))
    assert (series.name, series.times, series.values) == ("decode on decode-0", (0.0,), (1.0,))
    with pytest.raises(ValueError, match=r"b: .*parse error"):
        source.ask(Target("b", ""))
