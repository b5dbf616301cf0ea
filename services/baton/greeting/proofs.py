"""What two services prove to each other before a stream of theirs begins: that they have the cluster key.

The caller says its name and a nonce; the worker answers with its own and an HMAC over both; the caller
answers with another one. Each HMAC is also over who speaks, what kind of caller it is and both names, so that
a proof is good for one stream, from one caller to one worker: it cannot be replayed (no nonce is used twice),
sent back as the other side's, nor shown to another worker or under another name.

A proof says who is at the other end when the stream begins. What follows is neither encrypted nor signed: who
sits on the network between two services can pass their greetings on and then change what they say, unless
there is mTLS (docs/security.md).

Pure: messages in, messages out. ``baton.greeting.entrance`` and whoever calls do the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

from baton.names import check_name
from baton.v1.greeting_pb2 import Challenge, Greeting, Proof

Kind = Literal["router", "prefill"]
"""What calls: a router calls ``Worker.Connect``, a prefill worker ``Handoff.Link``."""

GREETING_S = 5.0
"""Until a greeting must be whole, on both sides."""
NONCE_BYTES = 32
PROOF_BYTES = 32
MOST_GREETING_BYTES = 512
"""Of one message of a greeting, which has a name of 128 characters, a nonce and a proof at most."""


class GreetingError(ConnectionError):
    """The other side did not prove who it is; says how."""


class MalformedGreetingError(GreetingError):
    """A field of its greeting cannot be; the text names it."""


class WrongProofError(GreetingError):
    """It has another cluster key, or its proof was made for another stream."""


class Caller:
    """The side that calls, for one stream."""

    def __init__(self, cluster_key: bytes, kind: Kind, name: str, nonce: bytes | None = None) -> None:
        """``name``: a router's id, or a prefill worker's incarnation. ``nonce``: None for a new one."""
        self.greeting = Greeting(name=name, nonce=nonce or secrets.token_bytes(NONCE_BYTES))
        """To be said first."""
        self._key = _key(cluster_key)
        self._kind = kind

    def prove(self, challenge: Challenge) -> Proof:
        """Our proof, once the worker's is right. Raises MalformedGreetingError and WrongProofError."""
        _check(challenge.incarnation, challenge.nonce)
        text = _text(self._kind, self.greeting, challenge.incarnation, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, _proof(self._key, b"worker", text)):
            raise WrongProofError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")
        return Proof(proof=_proof(self._key, b"caller", text))


class Called:
    """The worker that is called, for one stream."""

    def __init__(
        self, cluster_key: bytes, kind: Kind, incarnation: str, greeting: Greeting, nonce: bytes | None = None
    ) -> None:
        """Raises MalformedGreetingError. ``nonce``: None for a new one."""
        _check(greeting.name, greeting.nonce)
        ours = nonce or secrets.token_bytes(NONCE_BYTES)
        self._key = _key(cluster_key)
        self._text = _text(kind, greeting, incarnation, ours)
        self.challenge = Challenge(
            incarnation=incarnation, nonce=ours, proof=_proof(self._key, b"worker", self._text)
        )
        """To be said next."""

    def check(self, proof: Proof) -> None:
        """Raises WrongProofError unless the caller has the cluster key."""
        if not hmac.compare_digest(proof.proof, _proof(self._key, b"caller", self._text)):
            raise WrongProofError(
                "proof: it is of another cluster key (--cluster-key, BATON_CLUSTER_KEY), or of another stream"
            )


def _check(name: str, nonce: bytes) -> None:
    try:
        check_name("name", name)
    except ValueError as error:
        raise MalformedGreetingError(str(error)) from None
    if len(nonce) != NONCE_BYTES:
        raise MalformedGreetingError(f"nonce: must be {NONCE_BYTES} bytes, not {len(nonce)}")


def _key(cluster_key: bytes) -> bytes:
    # A key of its own: nothing else that the cluster key signs is ever taken for a proof.
    return hmac.digest(cluster_key, b"baton: greetings between services", hashlib.sha256)


def _text(kind: Kind, greeting: Greeting, incarnation: str, nonce: bytes) -> bytes:
    # Names have no line breaks, and nonces one length: no two streams have the same text.
    return f"{kind}\n{greeting.name}\n{incarnation}\n".encode() + greeting.nonce + nonce


def _proof(key: bytes, who: bytes, text: bytes) -> bytes:
    return hmac.digest(key, who + b"\n" + text, hashlib.sha256)
