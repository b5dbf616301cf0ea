"""Instant queries of Prometheus' HTTP API: bounded in time and size."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

MAX_BYTES = 1 << 20
TIMEOUT_S = 10.0
AT_ONCE = 8


class PrometheusError(Exception):
    """Prometheus cannot be reached, or does not answer what was asked."""


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True, rename="camel"):
    status: str
    data: _Data | None = None
    error: str = ""


class Prometheus:
    """The client of one Prometheus server. Use it as a context manager."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/") + "/api/v1/query"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def value(self, expression: str) -> float | None:
        """Return the value of the only series, or None without a series or a finite number. Raises
        PrometheusError."""
        series = await self._ask(expression)
        if len(series) > 1:
            raise PrometheusError(f"{len(series)} series where one was asked for: {expression}")
        return _number(series[0]) if series else None

    async def series(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and number of each series that has a finite number. Raises PrometheusError."""
        numbered = [(series.metric, _number(series)) for series in await self._ask(expression)]
        return [(labels, number) for labels, number in numbered if number is not None]

    async def _ask(self, expression: str) -> list[_Series]:
        assert self._session is not None
        try:
            async with self._gate, self._session.post(self._url, data={"query": expression}) as response:
                body = await _read(response)
                status = response.status
            answer = msgspec.json.decode(body, type=_Answer)
            if status != 200 or answer.status != "success" or answer.data is None:
                raise PrometheusError(f"{status} {answer.error or answer.status}: {expression}")
            if answer.data.result_type != "vector":
                raise PrometheusError(
                    f"a {answer.data.result_type} where a vector was asked for: {expression}"
                )
            return msgspec.json.decode(answer.data.result, type=list[_Series])
        except msgspec.MsgspecError as error:
            raise PrometheusError(f"no answer of Prometheus' API: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise PrometheusError(f"{self._url}: {error or type(error).__name__}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BYTES:
            raise PrometheusError(f"an answer of more than {MAX_BYTES} bytes")
    return bytes(body)


def _number(series: _Series) -> float | None:
    """Return a series' number; None for NaN, the mean of nothing, and for infinities. Raises
    PrometheusError."""
    try:
        number = float(series.value[1])
    except ValueError as error:
        raise PrometheusError(f"{series.value[1]!r} is no number") from error
    return number if math.isfinite(number) else None
