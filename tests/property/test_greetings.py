"""Greetings of services: a proof is good for one stream, of one caller, to one worker, with one key."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.names import MAX_NAME, check_address, check_name, check_words, is_name, shown
from baton.greeting.proofs import (
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    Called,
    Caller,
    GreetingError,
    Kind,
    MalformedGreetingError,
    WrongProofError,
)
from baton.v1.greeting_pb2 import Challenge, Greeting, Proof

NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=MAX_NAME)
NONCES = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
KINDS: st.SearchStrategy[Kind] = st.sampled_from(["router", "prefill"])


class Terms(NamedTuple):
    """All that a stream's proofs are made of."""

    key: bytes
    kind: Kind
    caller: str
    worker: str
    callers_nonce: bytes
    workers_nonce: bytes

    def proofs(self) -> tuple[Challenge, Proof]:
        """What both sides say where both are true."""
        caller = Caller(ClusterKeys(self.key), self.kind, self.caller, self.callers_nonce)
        called = self.called(caller.greeting)
        proof = caller.prove(called.challenge)
        called.check(proof)
        return called.challenge, proof

    def called(self, greeting: Greeting) -> Called:
        return Called(ClusterKeys(self.key), self.kind, self.worker, greeting, self.workers_nonce)


TERMS = st.builds(
    Terms,
    key=st.binary(max_size=40),
    kind=KINDS,
    caller=NAMES,
    worker=NAMES,
    callers_nonce=NONCES,
    workers_nonce=NONCES,
)


@given(TERMS)
def test_both_sides_with_one_key_prove_it(terms: Terms) -> None:
    challenge, proof = terms.proofs()
    assert challenge.proof != proof.proof, "neither can be sent back as the other's"
    for message in (Greeting(name=terms.caller, nonce=terms.callers_nonce), challenge, proof):
        assert message.ByteSize() < MAX_GREETING_BYTES


@given(TERMS, TERMS, st.sampled_from(Terms._fields))
def test_a_proof_is_good_for_nothing_else(ours: Terms, other: Terms, field: str) -> None:
    """Whatever differs: the key, the kind of caller, either name or either nonce."""
    changed = getattr(other, field)
    if field == "kind":
        changed = "router" if ours.kind == "prefill" else "prefill"
    theirs = ours._replace(**{field: changed})
    assume((theirs != ours and ours.key.rstrip(b"\0") != theirs.key.rstrip(b"\0")) or field != "key")
    assume(theirs != ours)
    challenge, proof = theirs.proofs()
    caller = Caller(ClusterKeys(ours.key), ours.kind, ours.caller, ours.callers_nonce)
    with pytest.raises(WrongProofError):
        ours.called(caller.greeting).check(proof)
    if field != "workers_nonce":  # that, and its own name, a worker says itself
        challenge.nonce = ours.workers_nonce
    with pytest.raises(WrongProofError):
        caller.prove(Challenge(incarnation=ours.worker, nonce=ours.workers_nonce, proof=challenge.proof))


@given(TERMS, st.binary(max_size=40))
def test_neither_side_takes_back_what_it_said(terms: Terms, other_key: bytes) -> None:
    """Reflection: who has no key sends each side its own proof, or that of a stream it calls itself."""
    challenge, proof = terms.proofs()
    caller = Caller(ClusterKeys(terms.key), terms.kind, terms.caller, terms.callers_nonce)
    with pytest.raises(WrongProofError):
        terms.called(caller.greeting).check(Proof(proof=challenge.proof))
    reflected = Challenge(incarnation=terms.worker, nonce=terms.workers_nonce, proof=proof.proof)
    with pytest.raises(WrongProofError):
        caller.prove(reflected)
    # The worker answers a greeting that repeats its own nonce: that is no proof of a caller either.
    mirrored = terms.called(Greeting(name=terms.caller, nonce=terms.workers_nonce)).challenge
    with pytest.raises(WrongProofError):
        terms.called(caller.greeting).check(Proof(proof=mirrored.proof))


KEYS = st.builds(
    ClusterKeys,
    st.sampled_from([b"a" * 16, b"b" * 16, b"c" * 16]),
    st.sampled_from([b"", b"b" * 16, b"c" * 16]),
)


@given(TERMS, KEYS, KEYS)
def test_two_sides_meet_by_any_key_that_both_accept(
    terms: Terms, ours: ClusterKeys, theirs: ClusterKeys
) -> None:
    """The caller's newest of them, whichever side is of the older generation."""
    caller = Caller(ours, terms.kind, terms.caller)
    called = Called(theirs, terms.kind, terms.worker, caller.greeting)
    assert called.challenge.ByteSize() < MAX_GREETING_BYTES
    common = [key for key in ours.accepted if key in theirs.accepted]
    if not common:
        with pytest.raises(WrongProofError, match="another cluster key"):
            caller.prove(called.challenge)
        return
    called.check(caller.prove(called.challenge))
    assert caller.agreed == common[0]


@given(TERMS)
def test_a_worker_with_two_keys_takes_neither_of_its_proofs_back(terms: Terms) -> None:
    caller = Caller(ClusterKeys(b"k" * 16), terms.kind, terms.caller)
    called = Called(ClusterKeys(b"n" * 16, b"k" * 16), terms.kind, terms.worker, caller.greeting)
    for proof in (called.challenge.proof, called.challenge.previous_proof):
        with pytest.raises(WrongProofError):
            called.check(Proof(proof=proof))
    # What of it is left out leaves no key that was not proved.
    with pytest.raises(WrongProofError):
        caller.prove(
            Challenge(incarnation=terms.worker, nonce=called.challenge.nonce, proof=called.challenge.proof)
        )


def test_a_worker_with_one_key_sends_one_proof() -> None:
    called = Called(
        ClusterKeys(b"k" * 16), "router", "w", Caller(ClusterKeys(b"k" * 16), "router", "r").greeting
    )
    assert not called.challenge.previous_proof


def test_no_nonce_comes_twice() -> None:
    callers = [Caller(ClusterKeys(b"k" * 16), "router", "r") for _ in range(100)]
    workers = [Called(ClusterKeys(b"k" * 16), "router", "w", callers[0].greeting) for _ in range(100)]
    nonces = {caller.greeting.nonce for caller in callers} | {called.challenge.nonce for called in workers}
    assert len(nonces) == 200 and {len(nonce) for nonce in nonces} == {NONCE_BYTES}


@given(TERMS, st.binary(max_size=80), st.text(max_size=200), st.binary(max_size=80))
def test_anything_else_is_a_greeting_error(terms: Terms, nonce: bytes, name: str, proof: bytes) -> None:
    """Whatever the fields hold, and no other exception."""
    assume(proof not in (terms.proofs()[0].proof, terms.proofs()[1].proof))
    fits = is_name(name) and len(nonce) == NONCE_BYTES
    try:
        called = Called(ClusterKeys(terms.key), terms.kind, terms.worker, Greeting(name=name, nonce=nonce))
    except MalformedGreetingError as error:
        assert not fits and re.match(r"name: must be|nonce: must be 32 bytes", str(error))
        assert str(error).isprintable() and len(str(error)) < 1024
    else:
        assert fits
        with pytest.raises(WrongProofError):
            called.check(Proof(proof=proof))
    with pytest.raises(GreetingError):
        Caller(ClusterKeys(terms.key), terms.kind, terms.caller).prove(
            Challenge(incarnation=name, nonce=nonce, proof=proof)
        )


@given(st.text(max_size=300))
def test_names_are_bounded_and_errors_stay_on_one_line(text: str) -> None:
    fits = 1 <= len(text) <= MAX_NAME and all("!" <= c <= "~" for c in text)
    assert is_name(text) == fits
    for check in (check_name, check_address, check_words):
        try:
            check("field", text)
        except ValueError as error:
            said = str(error)
            assert said.startswith("field: ") and said.isprintable() and said.isascii() and len(said) < 1024
        else:
            assert len(text) <= MAX_NAME and text.isprintable()
            assert check is check_words or fits


@pytest.mark.parametrize("text", ["", "a\n", "a b", "\x7f", "é", "a" * 129, "\u2028"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="router_id: must be 1 to 128 visible ASCII characters, not "):
        check_name("router_id", text)
    assert "\n" not in shown(text) and len(shown(text)) < 1024


@pytest.mark.parametrize("address", ["10.0.0.7:9000", "[::1]:9000", "a.pod.svc:1"])
def test_addresses(address: str) -> None:
    check_address("handoff_address", address)
    for wrong in (address.rpartition(":")[0], f"{address}00000", f"{address} ", f"{address}\n"):
        with pytest.raises(ValueError, match="handoff_address: "):
            check_address("handoff_address", wrong)
