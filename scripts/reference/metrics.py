"""The reference of metrics, from the calls that declare them: their sources are read, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scripts.reference.markdown import code, plain, prose, table
from scripts.site.pages import ROOT

PACKAGE = ROOT / "services/baton"
HEAD = """\
# All metrics

Every metric as the code declares it, by the module that does. [Metrics](../metrics.md) tells which process
exports which, in what unit, and how to read them.
"""

Kind = Literal["counter", "gauge", "histogram"]

DECLARING: Mapping[str, tuple[Kind, tuple[str, ...] | None]] = {
    "Counter": ("counter", None),
    "CounterMetricFamily": ("counter", None),
    "Gauge": ("gauge", None),
    "GaugeMetricFamily": ("gauge", None),
    "Histogram": ("histogram", None),
    "HistogramMetricFamily": ("histogram", None),
    "TallyCounter": ("counter", ("model",)),
    "TallyHistogram": ("histogram", ("model",)),
    "counter": ("counter", ("role",)),
    "gauge": ("gauge", ("role",)),
    "gauge_family": ("gauge", ("role",)),
}
"""Functions that declare a metric by its name and its text → its type, and its labels unless the call has
them."""


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """One metric. ``name`` has the ``_total`` of counters."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str


@dataclass
class Module:
    """A module's sources."""

    tree: ast.Module
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names that are bound to strings which are written out."""
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            match node:
                case ast.FunctionDef():
                    self.methods[node.name] = node
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple(elts=elements)):
                    texts = [element.value for element in elements if isinstance(element, ast.Constant)]
                    if len(texts) == len(elements):
                        self.names[name] = tuple(map(str, texts))


def page() -> str:
    """Return the page: a section for each module that declares metrics."""
    parts = [HEAD]
    for path, module in modules():
        rows = [
            (code(each.name), each.kind, ", ".join(map(code, each.labels)), plain(each.text))
            for each in sorted(declared(module), key=lambda metric: metric.name)
        ]
        if rows:
            said = (ast.get_docstring(module.tree) or "").partition("\n\n")[0]
            heading = f"## {path.relative_to(PACKAGE).with_suffix('').as_posix()}\n\n{prose(said)}\n\n"
            parts.append(heading + table(("metric", "type", "labels", "meaning"), rows))
    return "\n".join(parts).rstrip() + "\n"


def all_declared() -> Mapping[str, DeclaredMetric]:
    """Return every metric that the package declares, by its name."""
    return {each.name: each for _, module in modules() for each in declared(module)}


def modules() -> Iterator[tuple[Path, Module]]:
    """Yield the modules that name metrics."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '"baton_' in text:
            yield path, Module(ast.parse(text))


def declared(module: Module) -> Iterator[DeclaredMetric]:
    """Yield the metrics that a module declares, each once."""
    seen = set[str]()
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Call) and len(node.args) > 1):
            continue
        match node.args[:2]:
            case [ast.Constant(value=str(name)), ast.Constant(value=str(text))] if name.startswith("baton_"):
                if name in seen or (found := _declaration(node, module)) is None:
                    continue
                seen.add(name)
                kind, labels = found
                yield DeclaredMetric(name + "_total" * (kind == "counter"), kind, labels, text)


def _declaration(call: ast.Call, module: Module) -> tuple[Kind, tuple[str, ...]] | None:
    """Return the type and the labels of the metric that a call declares, be it by way of a method of the
    module's own; None: it declares none."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if called in DECLARING:
        kind, labels = DECLARING[called]
        return kind, _labels(call, module) if labels is None else labels
    method = module.methods.get(called)
    for inner in ast.walk(method) if method else ():
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) in DECLARING:
            kind, labels = DECLARING[ast.unparse(inner.func)]
            if method and method.args.vararg is not None:  # the labels, behind name and text
                return kind, tuple(ast.literal_eval(argument) for argument in call.args[2:])
            return kind, _labels(inner, module) if labels is None else labels
    return None


def _labels(call: ast.Call, module: Module) -> tuple[str, ...]:
    given = next((word.value for word in call.keywords if word.arg == "labels"), None)
    return _strings(given or (call.args[2] if len(call.args) > 2 else None), module)


def _strings(expression: ast.expr | None, module: Module) -> tuple[str, ...]:
    match expression:
        case None:
            return ()
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.Starred(value=inner):
            return _strings(inner, module)
        case ast.Tuple(elts=elements):
            return tuple(text for element in elements for text in _strings(element, module))
        case ast.Name(id=name) if name in module.names:
            return module.names[name]
    raise ValueError(f"labels are not written out: {ast.unparse(expression)}")
