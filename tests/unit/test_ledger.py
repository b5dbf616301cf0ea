"""The ledger: one writer to the client, and nothing told twice."""

from __future__ import annotations

from baton.core.logprobs import Logprobs, TokenDetails
from baton.router.dispatch.ledger import LedgerEntry
from baton.router.dispatch.types import TokenChunk
from baton.v1 import inference_pb2, worker_pb2
from tests.support.fake_ring import made_up

PROMPT = [4, 5, 6]


def delta(
    first_seq: int, token_ids: list[int], *, attempt: int = 0, num_top: int = 2, prompt: bool = False
) -> worker_pb2.TokenDelta:
    """Tokens as a worker sends them, with details."""
    details = TokenDetails(made_up(token_ids, num_top), made_up(PROMPT[1:], 1) if prompt else None)
    return worker_pb2.TokenDelta(
        attempt=attempt,
        first_seq=first_seq,
        token_ids=token_ids,
        cached_tokens=3,
        details=details.to_proto(),
    )


def accepted(entry: LedgerEntry, delta: worker_pb2.TokenDelta) -> TokenChunk:
    chunk = entry.accept(delta)
    assert isinstance(chunk, TokenChunk)
    return chunk


def told(chunk: TokenChunk) -> tuple[Logprobs | None, Logprobs | None]:
    assert chunk.details is not None
    return chunk.details.logprobs, chunk.details.prompt_logprobs


def test_a_delta_brings_the_logprobs_of_its_tokens() -> None:
    entry = LedgerEntry()
    first = accepted(entry, delta(0, [10], prompt=True))
    assert (first.token_ids, first.cached_tokens) == ((10,), 3)
    assert told(first) == (made_up([10], 2), made_up(PROMPT[1:], 1))
    second = accepted(entry, delta(1, [11, 12]))
    assert told(second) == (made_up([11, 12], 2), None)


def test_what_is_repeated_is_not_told_again() -> None:
    entry = LedgerEntry()
    accepted(entry, delta(0, [10], prompt=True))
    assert entry.accept(delta(0, [10], prompt=True)) is None, "decode repeats prefill's first token"
    later = accepted(entry, delta(0, [10, 11, 12], prompt=True))
    assert (later.token_ids, later.cached_tokens) == ((11, 12), 0)
    assert told(later) == (made_up([11, 12], 2), None)


def test_whoever_comes_first_with_the_first_token_tells_all() -> None:
    entry = LedgerEntry()
    repeated_by_decode = accepted(entry, delta(0, [10], prompt=True))
    assert told(repeated_by_decode)[1] is not None
    assert entry.accept(delta(0, [10], prompt=True)) is None, "prefill's own comes late"


def test_another_attempts_details_do_not_count() -> None:
    entry = LedgerEntry(attempt=1)
    assert entry.accept(delta(0, [10], attempt=0)) is None


def test_no_details_are_none() -> None:
    chunk = accepted(LedgerEntry(), worker_pb2.TokenDelta(first_seq=0, token_ids=[10]))
    assert chunk.details is None
    finish = worker_pb2.TokenDelta(
        first_seq=0, token_ids=[10], finish_reason=inference_pb2.FINISH_REASON_STOP
    )
    assert accepted(LedgerEntry(), finish).finish_reason == "stop"


def test_a_prompt_of_one_token_has_logprobs_all_the_same() -> None:
    details = TokenDetails(None, Logprobs(0)).to_proto()
    chunk = accepted(LedgerEntry(), worker_pb2.TokenDelta(first_seq=0, token_ids=[10], details=details))
    assert told(chunk) == (None, Logprobs(0, [], [], [], []))
