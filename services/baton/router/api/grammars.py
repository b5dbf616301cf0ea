"""Structured outputs are checked before any work is done for them, the same for every protocol."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

from baton.grammar.compiler import GrammarCompiler
from baton.grammar.errors import GrammarBusyError, GrammarError, GrammarLimitError
from baton.grammar.limits import TENANT_CPU_S
from baton.grammar.table import TokenTable
from baton.router.api.admission import refusal
from baton.router.api.errors import ApiError, RequestError, invalid
from baton.router.shared.limits import Decision, Tenant
from baton.router.shared.state import SharedState
from baton.structured_output import StructuredOutput
from baton.telemetry.grammar import GrammarStats
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer


class GrammarCheck:
    """Compiles grammars as the workers will, which compile them again: they trust nobody.

    A request that is refused here never comes to its tenant's limits, so it is counted for them here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shared: SharedState,
        metrics: RouterMetrics,
        *,
        tenant_cpu_s: float = TENANT_CPU_S,
    ) -> None:
        """``tenant_cpu_s``: CPU seconds a minute that each tenant's trials may take."""
        eos = tokenizer.special.eos_id
        self._compiler = GrammarCompiler(
            lambda: TokenTable.of(tokenizer, tokenizer.vocab_size, [0 if eos is None else eos]), tenant_cpu_s
        )
        self._shared = shared
        self._refusals = metrics.grammar_refusals
        self._barred: dict[str, tuple[float, Decision]] = {}
        """Tenants whose limit of requests was reached by refusals, until when (``time.monotonic()``)."""

    def stats(self) -> GrammarStats:
        return self._compiler.stats()

    async def check(self, param: str, output: StructuredOutput, tenant: Tenant) -> StructuredOutput:
        """``output``, if it can be followed. RequestError or ApiError, which name the field ``param``, if it
        cannot: 429 where ``tenant`` has had its part of trials or of requests, 503 where all want too
        many."""
        self._check_barred(tenant)
        try:
            # Others may wait for the same: that one client leaves must not cancel it.
            await asyncio.shield(asyncio.wrap_future(self._compiler.compile(output, tenant.name)))
        except GrammarError as error:
            reason, answer = _refused(param, error)
        else:
            return output
        self._refusals.labels(tenant.name, reason).inc()
        await self._count(tenant)
        raise answer

    def _check_barred(self, tenant: Tenant) -> None:
        """Raises ApiError for a tenant that has made as many requests as it may, by refused ones too: nothing
        is tried out for it any more."""
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
    """The word of the metric, and what the client is told."""
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
