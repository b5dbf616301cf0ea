"""Bounds on the bytes of request bodies that the router holds at once, in all and per tenant.

A body's declared size is reserved, or the size so far of a body that declares none, from its first byte until
its request is read.
"""

from __future__ import annotations

from types import TracebackType

from baton.router.api.errors import ApiError
from baton.router.api.http.server.connection import BODY_GRACE_S, BODY_PATIENCE_S, MIN_BODY_RATE
from baton.router.shared.limits import Tenant
from baton.telemetry.http import HttpMetrics

MIN_IN_ALL = 64 << 20
BODIES_IN_ALL = 8
"""The number of bodies of the largest size that there is room for, at least."""
SMALL = 64 << 10
"""The most bytes of a body that counts as small and is not refused because of large ones: it may use the last
quarter of the room."""
FOR_LARGE = 0.75


class BodyBudget:
    """The room for bodies of one process. Event loop's thread only."""

    def __init__(self, max_body_bytes: int, metrics: HttpMetrics, *, shared: bool) -> None:
        """``shared``: whether tenants, which have keys, share the room. Without keys clients cannot be told
        apart."""
        self.room = max(MIN_IN_ALL, BODIES_IN_ALL * max_body_bytes)
        self._shared = shared
        self._refused = metrics.refused
        self._used = 0
        self._tenants: dict[str, _Held] = {}
        metrics.body_bytes.set_function(lambda: self._used)

    def reservation(self, tenant: Tenant) -> BodyReservation:
        """Return a reservation for one body, a context manager around its reading and parsing. Entering it
        raises ApiError (429) if as many requests of ``tenant`` are being read as it may have under way."""
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
        """Reserve ``size`` bytes for a body in place of ``before``. Raises ApiError."""
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
        """Return the error for a body of which only ``size`` bytes have come in time, and count it."""
        self._refused.labels("slow_body").inc()
        return ApiError(
            408,
            f"The body comes too slowly: {size} bytes so far. After {BODY_GRACE_S:g} s it must have come "
            f"with {MIN_BODY_RATE} bytes a second in the mean, and not stand still for "
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
    """The bodies that one tenant has under way."""

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
        """Reserve room for ``size`` bytes. Raises ApiError: 429 if the tenant has too much under way compared
        with other tenants, 503 if all together have."""
        if size > self._size:
            self._budget.grow(self._tenant, self._size, size)
            self._size = size

    def too_slow(self, size: int) -> ApiError:
        """Return the error for a body of which only ``size`` bytes have come in time, and count it."""
        return self._budget.too_slow(size)

    def __enter__(self) -> BodyReservation:
        self._budget.begin(self._tenant)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.end(self._tenant, self._size)
