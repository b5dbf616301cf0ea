"""Generated pages of the documentation are what the code says today, and say all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest

from scripts.reference import alerts, metrics
from scripts.reference.__main__ import FOLDER, PAGES
from scripts.reference.markdown import code, plain, table
from tests.support.metric_docs import described


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    page: Callable[[], str] = PAGES[name]
    assert (FOLDER / name).read_text() == page(), (
        f"{name} is behind the code: run python -m scripts.reference, and commit the result"
    )


def test_there_are_no_other_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_declared_metrics_are_those_that_rings_export() -> None:
    """docs/metrics.md is compared with running rings by tests/e2e/test_observed.py."""
    known = {name: each for name, each in described().items() if not name.startswith("process_")}
    found = metrics.all_declared()
    assert found.keys() == known.keys()
    for name, metric in found.items():
        assert (metric.kind, frozenset(metric.labels)) == (known[name].type, known[name].labels), name


def test_a_metric_is_found_however_it_is_declared() -> None:
    source = """
NAMED = ("role", "peer")
class Metrics:
    def __init__(self):
        self.a = Counter("baton_a", "A.", ("x", "y"))
        self.b = self._gauge("baton_b", "B.", "z")
        self.c = GaugeMetricFamily("baton_c", "C.", labels=(*NAMED, "state"))
        self.d = self._rate("baton_a_total", "decode")
    def _gauge(self, name, text, *labels):
        return Gauge(name, text, labels)
    def _rate(self, name, role):
        return f"rate({name})"
class Stats:
    e: Annotated[int, counter("baton_e", "E.")]
"""
    found = {each.name: each for each in metrics.declared(metrics.Module(ast.parse(source)))}
    assert {name: (each.kind, each.labels) for name, each in found.items()} == {
        "baton_a_total": ("counter", ("x", "y")),
        "baton_b": ("gauge", ("z",)),
        "baton_c": ("gauge", ("role", "peer", "state")),
        "baton_e_total": ("counter", ("role",)),
    }


def test_every_alert_is_listed() -> None:
    names = [alert["alert"] for group in alerts.groups().values() for alert in group]
    assert re.findall(r"^\| \[(\w+)\]", (FOLDER / "alerts.md").read_text(), re.MULTILINE) == names


def test_text_cannot_break_a_table() -> None:
    assert plain("a_b *c* <d> [e] `f|g`\n h") == r"a\_b \*c\* &lt;d> \[e\] `f\|g` h"
    assert table(("x", "y"), [(code("a|b"), "")]) == "| x | y |\n|---|---|\n| `a\\|b` |  |\n"
    assert table(("x",), []) == ""
