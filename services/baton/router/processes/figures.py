"""The metrics of all processes of a router on one page, each series with the label ``process``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

LABEL = "process"


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A metric as one process has it."""

    name: str
    documentation: str
    kind: str
    samples: list[_Sample]


def families(metrics: Iterable[Metric]) -> list[Family]:
    """As another process can be told of them."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [_Sample(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


def pack(told: list[Family]) -> bytes:
    """Not as JSON, which has no NaN and no infinity."""
    return msgspec.msgpack.encode(told)


def unpack(packed: bytes) -> list[Family]:
    """What `pack` made. Raises ValueError if it did not."""
    return msgspec.msgpack.decode(packed, type=list[Family])


class Together(Collector):
    """A metric that several processes have, is one, with a series for each."""

    def __init__(self, processes: Mapping[int, Iterable[Family]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for index, families in sorted(self._processes.items()):
            for family in families:
                metric = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.kind)
                )
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, LABEL: str(index)}, sample.value)
        yield from merged.values()
