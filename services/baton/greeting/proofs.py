"""The proofs by which two services show each other, before a stream begins, that they have the cluster key.

The caller sends its name and a nonce. The worker answers with its own name and nonce and an HMAC over both
nonces. The caller answers with an HMAC of its own. Each HMAC also covers the side that sends it, the kind of
the caller and both names, so that a proof is good for one stream from one caller to one worker: it cannot be
replayed (no nonce is used twice), sent back as the other side's proof, nor shown to another worker or under
another name.

While the cluster key is replaced, a process has two: the worker sends a proof by each, and the caller answers
with the newest of its own keys that the worker has proved. Neither says which keys it has beyond the proofs
themselves (docs/security.md).

A proof identifies the peer when the stream begins. What follows is neither encrypted nor signed: an attacker
on the network between two services can relay their greetings and then change their messages, unless there is
mTLS (docs/security.md).

Pure: messages in, messages out. ``baton.greeting.entrance`` and the callers send and receive them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.names import check_name
from baton.v1.greeting_pb2 import Challenge, Greeting, Proof

Kind = Literal["router", "prefill"]
"""The kind of a caller: a router calls ``Worker.Connect``, a prefill worker ``Handoff.Link``."""

GREETING_S = 5.0
"""The time in which a greeting must be whole, on both sides, in seconds."""
NONCE_BYTES = 32
CALLERS_MESSAGES = 2
"""The number of messages that a caller sends in a greeting: the Greeting and the Proof."""
MAX_GREETING_BYTES = 512
"""Most bytes of one message of a greeting, which has a name of 128 characters, a nonce and a proof at
most."""


class GreetingError(ConnectionError):
    """The peer did not prove who it is. The text says why."""


class NoChallengeError(GreetingError):
    """The worker answered a greeting with something else than a challenge."""

    def __init__(self) -> None:
        super().__init__("it answers a greeting with no challenge: is it of an older release?")


class MalformedGreetingError(GreetingError):
    """A field of the peer's greeting is invalid. The text names it."""


class WrongProofError(GreetingError):
    """The peer has another cluster key, or its proof was made for another stream."""


class Caller:
    """The caller's side of one greeting."""

    def __init__(self, keys: ClusterKeys, kind: Kind, name: str, nonce: bytes | None = None) -> None:
        """``name``: a router's id, or a prefill worker's incarnation. ``nonce``: None for a random one."""
        self.greeting = Greeting(name=name, nonce=nonce or secrets.token_bytes(NONCE_BYTES))
        """The first message to send."""
        self.agreed = keys.current
        """The cluster key that both sides have, once ``prove`` has returned. What the caller signs for this
        worker later is signed with it."""
        self._keys = keys
        self._kind = kind

    def prove(self, challenge: Challenge) -> Proof:
        """Check the worker's proof and return ours. Raises MalformedGreetingError and WrongProofError."""
        _check(challenge.incarnation, challenge.nonce)
        text = _text(self._kind, self.greeting, challenge.incarnation, challenge.nonce)
        for key in self._keys.accepted:
            theirs = _proof(key, b"worker", text)
            if any(hmac.compare_digest(each, theirs) for each in (challenge.proof, challenge.previous_proof)):
                self.agreed = key
                return Proof(proof=_proof(key, b"caller", text))
        raise WrongProofError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")


class Called:
    """The worker's side of one greeting."""

    def __init__(
        self,
        keys: ClusterKeys,
        kind: Kind,
        incarnation: str,
        greeting: Greeting,
        nonce: bytes | None = None,
    ) -> None:
        """Raises MalformedGreetingError. ``nonce``: None for a random one."""
        _check(greeting.name, greeting.nonce)
        ours = nonce or secrets.token_bytes(NONCE_BYTES)
        self._keys = keys
        self._text = _text(kind, greeting, incarnation, ours)
        proof, *previous = (_proof(key, b"worker", self._text) for key in keys.accepted)
        self.challenge = Challenge(
            incarnation=incarnation, nonce=ours, proof=proof, previous_proof=b"".join(previous)
        )
        """The answer to the caller's greeting."""

    def check(self, proof: Proof) -> None:
        """Raises WrongProofError unless the caller has a cluster key that is accepted."""
        known = (_proof(key, b"caller", self._text) for key in self._keys.accepted)
        if not any(hmac.compare_digest(proof.proof, each) for each in known):
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


def _text(kind: Kind, greeting: Greeting, incarnation: str, nonce: bytes) -> bytes:
    # Names have no line breaks, and all nonces have one length: no two streams have the same text.
    return f"{kind}\n{greeting.name}\n{incarnation}\n".encode() + greeting.nonce + nonce


def _proof(cluster_key: bytes, who: bytes, text: bytes) -> bytes:
    # A derived key: nothing else that the cluster key signs can be taken for a proof.
    key = hmac.digest(cluster_key, b"baton: greetings between services", hashlib.sha256)
    return hmac.digest(key, who + b"\n" + text, hashlib.sha256)
