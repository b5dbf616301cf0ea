"""How much of request bodies the router holds at once, in all and of each tenant.

What is reserved is a body's declared size, or of a body without one what has come of it, from its first byte
until its request is understood.
"""

from __future__ import annotations

from types import TracebackType

from baton.router.api.errors import ApiError
from baton.router.api.http.connection import BODY_GRACE_S, BODY_PATIENCE_S, LEAST_BODY_RATE
from baton.router.shared.limits import Tenant
from baton.telemetry.http import HttpMetrics

LEAST_IN_ALL = 64 << 20
BODIES_IN_ALL = 8
"""Bodies of the largest size that there is room for, at least."""
SMALL = 64 << 10
"""Bytes. A body of up to so many is not refused for large ones: it may have the last quarter of the room."""
FOR_LARGE = 0.75


class BodyBudget:
    """Of one process. Event loop's thread only."""

    def __init__(self, max_body_bytes: int, metrics: HttpMetrics, *, shared: bool) -> None:
        """``shared``: between tenants, that have keys. Without keys nobody can be told apart."""
        self.room = max(LEAST_IN_ALL, BODIES_IN_ALL * max_body_bytes)
        self._shared = shared
        self._refused = metrics.refused
        self._used = 0
        self._tenants: dict[str, _Held] = {}
        metrics.body_bytes.set_function(lambda: self._used)

    def reservation(self, tenant: Tenant) -> BodyReservation:
        """For one body, as a context manager around its reading and parsing. Raises ApiError (429) on
        entering when as many requests of ``tenant`` are being read as it may have under way."""
        return BodyReservation(self, tenant)

    def begin(self, tenant: Tenant) -> None:
        held = self._tenants.get(tenant.name)
        most = tenant.limits.concurrent
        if held is None:
            held = self._tenants[tenant.name] = _Held()
        elif most is not None and held.bodies >= most:
            self._refused.labels("tenant_bodies").inc()
            raise ApiError(
                429,
                f"The limit of {tenant.name} is reached: {most} concurrent requests. Their bodies are still "
                "being read.",
                code="rate_limit_exceeded",
            )
        held.bodies += 1

    def grow(self, tenant: Tenant, before: int, size: int) -> None:
        """A body needs ``size`` bytes in place of ``before``. Raises ApiError."""
        more = size - before
        room = self.room if size <= SMALL else int(FOR_LARGE * self.room)
        left = room - self._used - more
        held = self._tenants[tenant.name]
        if left < 0:
            self._refused.labels("body_bytes").inc()
            raise ApiError(
                503,
                f"The server is overloaded: it has room for {room} bytes of request bodies, "
                f"and {self._used} are used.",
                code="overloaded",
            )
        if self._shared and size > SMALL and held.size + more > left:
            self._refused.labels("tenant_body_bytes").inc()
            raise ApiError(
                429,
                f"{tenant.name} has more bytes of request bodies under way ({held.size}) than its share.",
                code="rate_limit_exceeded",
            )
        held.size += more
        self._used += more

    def too_slow(self, size: int) -> ApiError:
        """What is answered to a body of which only ``size`` bytes have come in time."""
        self._refused.labels("slow_body").inc()
        return ApiError(
            408,
            f"The body comes too slowly: {size} bytes so far. After {BODY_GRACE_S:g} s it must have come "
            f"with {LEAST_BODY_RATE} bytes a second in the mean, and not stand still for "
            f"{BODY_PATIENCE_S:g} s.",
            code="request_timeout",
            headers={"connection": "close"},
        )

    def end(self, tenant: Tenant, size: int) -> None:
        held = self._tenants[tenant.name]
        held.bodies -= 1
        held.size -= size
        self._used -= size
        if not held.bodies:
            del self._tenants[tenant.name]


class _Held:
    """What one tenant has."""

    __slots__ = ("bodies", "size")

    def __init__(self) -> None:
        self.bodies = 0
        self.size = 0


class BodyReservation:
    """Room for one body."""

    def __init__(self, budget: BodyBudget, tenant: Tenant) -> None:
        self._budget = budget
        self._tenant = tenant
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Make room for ``size`` bytes. Raises ApiError: 429 when the tenant has too much under way beside
        others, 503 when all have."""
        if size > self._size:
            self._budget.grow(self._tenant, self._size, size)
            self._size = size

    def too_slow(self, size: int) -> ApiError:
        """What is answered when no more than ``size`` bytes have come in time; it is counted."""
        return self._budget.too_slow(size)

    def __enter__(self) -> BodyReservation:
        self._budget.begin(self._tenant)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.end(self._tenant, self._size)
