"""Requests that schemathesis makes from the OpenAPI document, valid ones and others."""

from __future__ import annotations

from collections.abc import Iterator

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from loadtest.fuzz.account import Account

TIMEOUT_S = 60.0
DOCUMENTED = frozenset({503, 529})
"""Nobody is there for the request now; in Anthropic's shape 529."""


def fuzz_http(url: str, examples: int) -> Iterator[Account]:
    """``examples`` requests for each operation, half of them by the schema."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        account = Account(f"{operation.method.upper()} {operation.path}")
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                cases = operation.as_strategy(generation_mode=mode)
            except Exception as error:  # noqa: BLE001 - an operation without input has no wrong input
                account.outcomes[f"no {mode.value} case: {type(error).__name__}"] += 1
                continue
            _send_all(cases, account, -(-examples // 2))
        yield account


def _send_all(cases: object, account: Account, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(cases)  # type: ignore[arg-type]
    def send(case: Case) -> None:
        try:
            response = case.call(timeout=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, no answer is a violation
            account.add(type(error).__name__)
            account.blame(f"{type(error).__name__}: {case.as_curl_command()[:600]}")
            return
        account.add(str(response.status_code))
        if response.status_code >= 500 and response.status_code not in DOCUMENTED:
            account.blame(f"{response.status_code} {response.text[:200]}: {case.as_curl_command()[:600]}")

    try:
        send()
    except Exception as error:  # noqa: BLE001 - a schema that nothing can be made of
        account.outcomes[f"{type(error).__name__}"] += 1
