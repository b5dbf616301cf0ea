"""Requests that schemathesis makes from the OpenAPI document, valid and invalid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from loadtest.fuzz.account import Account

TIMEOUT_S = 60.0
DOCUMENTED = frozenset({503, 529})
"""Statuses for a ring without a worker for the request; 529 is Anthropic's."""


def fuzz_http(url: str, examples: int) -> Iterator[Account]:
    """Send ``examples`` requests for each operation, half of them by the schema."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        if not isinstance(found, Ok):
            raise found.err()  # the document itself is wrong
        operation = found.ok()
        account = Account(f"{operation.method.upper()} {operation.path}")
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = operation.as_strategy(generation_mode=mode)
            if mode is GenerationMode.POSITIVE:
                cases = _nearer(cases)
            try:
                _send_all(cases, account, -(-examples // 2))
            except Unsatisfiable:  # an operation without input has no wrong input
                account.outcomes[f"no {mode.value} case"] += 1
        if not account.sent or (operation.body and account.sent < examples):
            account.blame(f"only {account.sent} of {examples} requests could be made")
        yield account


KEPT = frozenset({"prompt", "messages", "input", "tokens", "max_tokens"})
USER = {"role": "user", "content": "What is Baton?"}
AnyCase: TypeAlias = "Case[Any]"


@st.composite
def _nearer(draw: st.DrawFn, cases: st.SearchStrategy[AnyCase]) -> AnyCase:
    """Draw a case with fewer fields, for the served model and few tokens: a case with more to refuse tests
    less."""
    case = draw(cases)
    if not isinstance(case.body, dict):
        return case
    for name in list(case.body):
        if name == "model" or (name not in KEPT and draw(st.integers(0, 3))):
            del case.body[name]
    if "messages" in case.body and draw(st.booleans()):
        case.body["messages"] = [dict(USER)]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        value = case.body.get(name)
        if isinstance(value, int):
            case.body[name] = 1 + value % 16
    return case


def _send_all(cases: st.SearchStrategy[AnyCase], account: Account, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases)
    def send(case: AnyCase) -> None:
        try:
            response = case.call(timeout=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, no answer is a violation
            account.add(type(error).__name__)
            account.blame(f"{type(error).__name__}: {case.as_curl_command()[:600]}")
            return
        account.add(str(response.status_code))
        if response.status_code >= 500 and response.status_code not in DOCUMENTED:
            account.blame(f"{response.status_code} {response.text[:200]}: {case.as_curl_command()[:600]}")

    send()
