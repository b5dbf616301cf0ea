"""The first bytes between two nodes of a worker: each proves to the other that it has the cluster key.

The joining node sends a nonce; the leader answers with its own and an HMAC over both by each of the two keys
that it may have while the key is replaced (noise in place of one that it lacks); the joining node answers
with another HMAC, by a key that the leader has proved. No nonce is used twice, and neither side's proof can
be sent back as the other's.
All is of fixed size: a stranger gets no further than 76 bytes. What follows is not encrypted: see
docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from baton.greeting.cluster_key import ClusterKeys

MAGIC = b"baton-node-2"
HANDSHAKE_S = 5.0
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class HandshakeError(ConnectionError):
    """The other side did not prove its identity; the message says how it failed."""


class WrongKeyError(HandshakeError):
    """The other side is a node of a worker, with another cluster key."""


def join(sock: socket.socket, keys: ClusterKeys) -> None:
    """Prove the key as the side that called. Raises HandshakeError, and OSError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(MAGIC + ours)
    answer = _exactly(sock, _NONCE_BYTES + 2 * _PROOF_BYTES)
    theirs, proofs = answer[:_NONCE_BYTES], (answer[_NONCE_BYTES:-_PROOF_BYTES], answer[-_PROOF_BYTES:])
    for key in keys.accepted:
        known = _proof(key, b"leader", ours, theirs)
        if any(hmac.compare_digest(proof, known) for proof in proofs):
            sock.sendall(_proof(key, b"node", ours, theirs))
            return
    raise WrongKeyError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")


def admit(sock: socket.socket, keys: ClusterKeys) -> None:
    """Prove the key as the side that was called. Raises HandshakeError, and OSError."""
    greeting = _exactly(sock, len(MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("what it says is not how a node begins")
    theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    proofs = b"".join(_proof(key, b"leader", theirs, ours) for key in keys.accepted)
    sock.sendall(ours + proofs + secrets.token_bytes(2 * _PROOF_BYTES - len(proofs)))
    proof = _exactly(sock, _PROOF_BYTES)
    known = (_proof(key, b"node", theirs, ours) for key in keys.accepted)
    if not any(hmac.compare_digest(proof, each) for each in known):
        raise WrongKeyError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")


def _proof(cluster_key: bytes, who: bytes, joining: bytes, leading: bytes) -> bytes:
    # The derived key serves the handshake alone: nothing else that the cluster key signs passes for a proof.
    key = hmac.digest(cluster_key, b"baton: nodes of one worker", hashlib.sha256)
    return hmac.digest(key, who + b"\n" + joining + leading, hashlib.sha256)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    until = time.monotonic() + HANDSHAKE_S
    while len(data) < size:
        if time.monotonic() > until:  # each piece may take as long as the socket allows
            raise HandshakeError("it is too slow")
        piece = sock.recv(size - len(data))
        if not piece:
            raise HandshakeError("it closed the connection")
        data += piece
    return bytes(data)
