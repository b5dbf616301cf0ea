"""The check of structured outputs before any work is done for them, the same for every protocol."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

from baton.core.structured_output import StructuredOutput
from baton.grammar.compiler import GrammarCompiler, GrammarStats
from baton.grammar.errors import GrammarBusyError, GrammarError, GrammarLimitError
from baton.grammar.limits import TENANT_CPU_S
from baton.grammar.table import TokenTable
from baton.router.api.admission import refusal
from baton.router.api.errors import ApiError, RequestError, invalid
from baton.router.shared.limits import LimitDecision, Tenant
from baton.router.shared.state import SharedState
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer


class GrammarCheck:
    """Compiles grammars as the workers will. Workers compile them again: they trust no router.

    A request that is refused here never reaches its tenant's limits, so it is counted against them here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shared: SharedState,
        metrics: RouterMetrics,
        *,
        tenant_cpu_s: float = TENANT_CPU_S,
    ) -> None:
        """``tenant_cpu_s``: the CPU time per minute that each tenant's compilations may take, in seconds."""
        eos = tokenizer.special.eos_id
        self._compiler = GrammarCompiler(
            lambda: TokenTable.of(tokenizer, tokenizer.vocab_size, [0 if eos is None else eos]), tenant_cpu_s
        )
        self._shared = shared
        self._refusals = metrics.grammar_refusals
        self._barred: dict[str, tuple[float, LimitDecision]] = {}
        """Tenants that reached their limit of requests by refused ones: the end of the bar, by
        ``time.monotonic``, and the decision to tell."""

    def stats(self) -> GrammarStats:
        return self._compiler.stats()

    async def check(self, param: str, output: StructuredOutput, tenant: Tenant) -> StructuredOutput:
        """Return ``output`` if its grammar compiles.

        Raises RequestError or ApiError, which name the field ``param``, if not: 429 if ``tenant`` has used up
        its part of compilations or of requests, 503 if all tenants together ask for too many.
        """
        self._check_barred(tenant)
        try:
            # Shielded, as other requests may wait for the same grammar: one client that leaves must not
            # cancel it.
            await asyncio.shield(asyncio.wrap_future(self._compiler.compile(output, tenant.name)))
        except GrammarError as error:
            reason, answer = _refused(param, error)
        else:
            return output
        self._refusals.labels(tenant.name, reason).inc()
        await self._count(tenant)
        raise answer

    def _check_barred(self, tenant: Tenant) -> None:
        """Raise ApiError for a tenant that has made as many requests as it may, counting refused ones:
        nothing more is compiled for it."""
        until, decision = self._barred.get(tenant.name, (0.0, None))
        left_s = until - time.monotonic()
        if decision is None:
            return
        if left_s <= 0:
            del self._barred[tenant.name]
            return
        self._refusals.labels(tenant.name, "requests").inc()
        raise refusal(tenant, replace(decision, wait_ms=math.ceil(1000 * left_s)), 0)

    async def _count(self, tenant: Tenant) -> None:
        decision = await self._shared.count_request(tenant)
        if decision.refused_by is not None:
            self._barred[tenant.name] = time.monotonic() + decision.wait_ms / 1000, decision


def _refused(param: str, error: GrammarError) -> tuple[str, ApiError | RequestError]:
    """Return the metric's label, and the error for the client."""
    if isinstance(error, GrammarLimitError):
        seconds = max(1, math.ceil(error.retry_after_s))
        return "tenant", ApiError(
            429,
            f"{param}: {error}. Forms that are known go on; try a new one again in {seconds} s.",
            param=param,
            code="rate_limit_exceeded",
            headers={"retry-after": str(seconds)},
        )
    if isinstance(error, GrammarBusyError):
        return "overall", ApiError(503, f"{param}: {error}.", param=param, code="overloaded")
    return "invalid", invalid(param, f"{param} cannot be followed: {error}.")
