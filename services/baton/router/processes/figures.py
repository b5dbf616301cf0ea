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


class MetricFamily(msgspec.Struct, array_like=True, frozen=True):
    """A metric of one process."""

    name: str
    documentation: str
    kind: str
    samples: list[_Sample]


def families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    """Return metrics in a form that can be sent to another process."""
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [_Sample(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


def pack(told: list[MetricFamily]) -> bytes:
    """Serialize metrics as MessagePack: JSON has no NaN and no infinity."""
    return msgspec.msgpack.encode(told)


def unpack(packed: bytes) -> list[MetricFamily]:
    """Deserialize the bytes made by `pack`. Raises ValueError for other bytes."""
    return msgspec.msgpack.decode(packed, type=list[MetricFamily])


class Together(Collector):
    """A collector that merges the metrics of several processes: each metric has the series of all
    processes."""

    def __init__(self, processes: Mapping[int, Iterable[MetricFamily]]) -> None:
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
