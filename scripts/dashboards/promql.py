"""The few shapes of PromQL that the dashboards are made of."""

from __future__ import annotations

from collections.abc import Sequence

RATE = "$__rate_interval"


def select(metric: str, **labels: str) -> str:
    """Series of a metric in the namespaces chosen, with labels that equal, or with a ``~`` in front match."""
    matchers = ['namespace=~"$namespace"']
    for name, value in labels.items():
        operator, text = ("=~", value[1:]) if value.startswith("~") else ("=", value)
        matchers.append(f'{name}{operator}"{text}"')
    return f"{metric}{{{', '.join(matchers)}}}"


def routers(metric: str, **labels: str) -> str:
    """Of the models chosen; the router's metrics of requests have the label."""
    return select(metric, model="~$model", **labels)


def rate(series: str) -> str:
    return f"rate({series}[{RATE}])"


def of_models(vector: str) -> str:
    """What workers export has no label for the model, as they have but one: found by who they are."""
    return f'({vector} and on (instance) baton_info{{model=~"$model"}})'


def of_routers(vector: str) -> str:
    """Of the processes that are routers."""
    return f'({vector} and on (instance) baton_info{{role="router"}})'


def largest(vector: str, by: Sequence[str]) -> str:
    return f"max by ({', '.join(by)}) ({vector})"


def total(vector: str, by: Sequence[str] = ()) -> str:
    return f"sum by ({', '.join(by)}) ({vector})" if by else f"sum({vector})"


def worker_rate(metric: str, by: Sequence[str] = (), **labels: str) -> str:
    """Of workers, added up."""
    return total(of_models(rate(select(metric, **labels))), by)


def worker_now(metric: str, by: Sequence[str] = (), **labels: str) -> str:
    return total(of_models(select(metric, **labels)), by)


def quantile(share: float, buckets: str, by: Sequence[str] = ()) -> str:
    """``buckets``: rates of a histogram's."""
    return f"histogram_quantile({share:g}, {total(buckets, ('le', *by))})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def or_zero(vector: str) -> str:
    """For what may never have happened."""
    return f"{vector} or vector(0)"
