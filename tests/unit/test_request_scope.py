"""The scope of a request: what it enters, what each part hears of the answer, and that each is left."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry

from baton.core.sampling_params import ResolvedSampling
from baton.router.admission.capacity import Capacity
from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueBounds, QueueEntry
from baton.router.api.audit import AuditRecord
from baton.router.api.errors import ApiError
from baton.router.api.job import Job
from baton.router.api.meter import ModelMeters
from baton.router.api.scope import RequestScope, Surroundings
from baton.router.shared.limits import Limits, Tenant
from baton.router.shared.state import SharedState
from baton.router.traces.record import RequestTrace
from baton.router.traces.store import Traces
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.choice import Delta
from baton.text.tokenizer import Tokenizer
from tests.support.fake_ring import MODEL
from tests.support.tiny_tokenizers import byte_level_tokenizer

PROMPT = 7
ACME = Tenant("acme", Limits(tokens_per_minute=1000, concurrent=1))


class Counted:
    """The surroundings of one model, and what they have of its requests."""

    def __init__(self, tokenizer: Tokenizer, *, max_wait_s: float = 30.0) -> None:
        registry = CollectorRegistry()
        self.metrics = RouterMetrics(registry)
        self.shared = SharedState(None, SharedStateMetrics(registry))
        bounds = QueueBounds(requests=8, prompt_tokens=1000, max_wait_s=max_wait_s)
        self.gate = Gate(bounds, lambda: Capacity(seats=1), AdmissionMetrics(registry))
        self.ended: list[RequestTrace] = []
        traces = Traces(on_end=self.ended.append)
        self.record = AuditRecord("r")
        self.around = Surroundings(self.shared, self.gate, traces, ModelMeters(self.metrics), tokenizer)

    def scope(self, tenant: Tenant = ACME, *, max_tokens: int = 10, n: int = 1) -> RequestScope:
        job = Job(
            request_id="cmpl-1",
            endpoint="/v1/completions",
            started=time.perf_counter(),
            model=MODEL,
            prompts=[[1] * PROMPT],
            params=ResolvedSampling(max_tokens=max_tokens),
            n=n,
            record=self.record,
        )
        return RequestScope(job, tenant, self.around)

    async def left_of_minute(self) -> int:
        """Tokens that the tenant may still use in this minute."""
        decision, lease = await self.shared.admit(ACME, 0)
        assert decision.tokens is not None, "or a request is still under way"
        if lease is not None:
            self.shared.settle(lease, 0)
        return decision.tokens.remaining

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def counted(tokenizer: Tokenizer) -> Counted:
    return Counted(tokenizer)


async def test_every_part_hears_of_the_answer(counted: Counted) -> None:
    async with counted.scope(n=2) as scope:
        assert counted.gate.view().open_answers == 2
        assert scope.trace.outcome == "running"
        for index in (0, 1):
            scope.delivered(index, Delta("ab", (1, 2), cached_tokens=4))
            scope.delivered(index, Delta("c", (3,), "stop"))
    record = counted.record
    assert (record.model, record.prompt_tokens, record.outcome) == ("tiny", PROMPT, "completed")
    assert (record.completion_tokens, record.cached_tokens) == (6, 4), "a prompt is cached once"
    assert await counted.left_of_minute() == 1000 - PROMPT - 6
    assert counted.gate.view().open_answers == 0
    assert counted.value("baton_admission_tokens_total", tenant="acme") == PROMPT + 6
    assert counted.value("baton_generated_tokens_total", model="tiny") == 6
    assert counted.value("baton_cached_prompt_tokens_total", model="tiny") == 4
    [trace] = counted.ended
    assert trace.outcome == "completed" and [each.tokens for each in trace.delivered] == [3, 3]


async def test_what_its_limits_refuse_enters_no_queue(counted: Counted) -> None:
    scope = counted.scope(max_tokens=2000)
    with pytest.raises(ApiError) as refused:
        async with scope:
            pytest.fail("it was let in")
    assert refused.value.code == counted.record.outcome == scope.trace.outcome == "request_too_large"
    assert scope.trace.admitted is not None and scope.trace.turn is None
    assert await counted.left_of_minute() == 1000
    assert counted.value("baton_admission_tokens_total", tenant="acme") is None
    assert counted.value("baton_prompt_tokens_total", model="tiny") is None, "no figures of what never ran"


async def test_what_the_queue_refuses_has_used_nothing(tokenizer: Tokenizer) -> None:
    counted = Counted(tokenizer, max_wait_s=0.02)
    async with counted.scope(Tenant("other")):
        with pytest.raises(ApiError) as refused:
            async with counted.scope():
                pytest.fail("it was let in")
    assert refused.value.code == counted.record.outcome == "overloaded"
    assert await counted.left_of_minute() == 1000


async def test_an_error_is_told_to_every_part(counted: Counted) -> None:
    with pytest.raises(GeneratorExit):
        async with counted.scope() as scope:
            scope.delivered(0, Delta("ab", (1, 2)))
            raise GeneratorExit
    assert counted.record.outcome == counted.ended[0].outcome == "cancelled"
    assert await counted.left_of_minute() == 1000 - PROMPT - 2
    ended = {"model": "tiny", "endpoint": "/v1/completions"}
    assert counted.value("baton_choices_total", finish_reason="cancelled", **ended) == 1
    assert counted.value("baton_requests_in_flight", **ended) == 0


async def test_each_part_is_left_even_if_another_cannot_be(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(entry: QueueEntry, outputs: int, *, completed: bool) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(counted.gate, "leave", broken)
    with pytest.raises(ValueError, match="a bug"):
        async with counted.scope() as scope:
            scope.delivered(0, Delta("ab", (1, 2), "stop"))
    assert await counted.left_of_minute() == 1000 - PROMPT - 2
    assert counted.record.completion_tokens == 2 and len(counted.ended) == 1
