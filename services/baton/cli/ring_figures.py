"""The figures of a ring that ``baton top`` shows, as its router tells them at ``/ui/data``."""

from __future__ import annotations

import msgspec

from baton.cli.client import RefusalError, get
from baton.process.options import UserError

PATH = "/ui/data"


class WorkerFigures(msgspec.Struct, frozen=True):
    """One worker."""

    address: str
    role: str
    model: str
    ready: bool
    draining: bool
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    open_handoffs: int
    ejected: bool = False
    refused: bool = False
    prompt_tokens: int = 0
    """The prompt tokens that it has computed since it started."""
    generated_tokens: int = 0
    """The tokens that it has sampled since it started."""

    @property
    def blocks(self) -> int:
        return self.blocks_free + self.blocks_cached + self.blocks_held

    @property
    def state(self) -> str:
        """What keeps it from being given requests; else "ready"."""
        if self.refused:
            return "refused"
        if not self.ready:
            return "not ready"
        if self.draining:
            return "draining"
        return "ejected" if self.ejected else "ready"


class WorkerRates(msgspec.Struct, frozen=True):
    """What a worker does in a second."""

    prompt: float
    """Prompt tokens computed."""
    generated: float
    """Tokens sampled."""


class PointFigures(msgspec.Struct, frozen=True):
    """Rates per second over some seconds, and quantiles in milliseconds, None if nothing was observed."""

    token_rate: float
    prompt_rate: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None


class TenantFigures(msgspec.Struct, frozen=True):
    """One tenant."""

    tenant: str
    waiting: float


class RingFigures(msgspec.Struct, frozen=True):
    """A ring. Fields that the router tells besides these are left out."""

    in_flight: float = 0
    waiting: float = 0
    prompt_tokens: float = 0
    generated_tokens: float = 0
    answers: float = 0
    workers: list[WorkerFigures] = []
    points: list[PointFigures] = []
    tenants: list[TenantFigures] = []
    operator: bool = True
    """Whether the key is an operator's: others are told of their own tenant alone."""


def rates_between(before: RingFigures, now: RingFigures, seconds: float) -> dict[str, WorkerRates]:
    """The rates of each worker, by address, between two looks that are so many seconds apart. A worker that
    is new, or has started anew, has none yet."""
    then = {one.address: one for one in before.workers}
    rates = {}
    for one in now.workers:
        old = then.get(one.address)
        if (
            old is None
            or one.prompt_tokens < old.prompt_tokens
            or one.generated_tokens < old.generated_tokens
        ):
            continue
        rates[one.address] = WorkerRates(
            (one.prompt_tokens - old.prompt_tokens) / seconds,
            (one.generated_tokens - old.generated_tokens) / seconds,
        )
    return rates


def ask_for_figures(url: str, api_key: str | None) -> RingFigures:
    """Raises UserError, one line, if no router answers at ``url``, it tells no figures, or the key is not an
    operator's."""
    try:
        body = get(url, PATH, api_key)
    except RefusalError as error:
        if error.status == 404:
            raise UserError(
                f"{url} has no {PATH}: it is no router of Baton's, or runs with --no-ui"
            ) from None
        if error.status in (401, 403):
            raise UserError(f"{url}: an operator's key is needed (--api-key): {error.reason}") from None
        raise
    try:
        told = msgspec.json.decode(body, type=RingFigures)
    except msgspec.DecodeError as error:
        raise UserError(f"{url} tells figures that this version does not know: {error}") from None
    if not told.operator:
        raise UserError(f"{url}: an operator's key is needed (--api-key): this one is of a tenant alone")
    return told
