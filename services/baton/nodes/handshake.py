"""The first bytes between two nodes of a worker: each proves to the other that it has the cluster key.

The one that joins says a nonce; the leader answers with its own and an HMAC over both; the one that joins
answers with another one. No nonce is used twice, and neither side's proof can be sent back as the other's.
All is of fixed size: a stranger gets no further than 76 bytes. What follows is not encrypted: see
docs/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

MAGIC = b"baton-node-1"
HANDSHAKE_S = 5.0
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class HandshakeError(ConnectionError):
    """The other side did not prove who it is; says how."""


class WrongKeyError(HandshakeError):
    """It is a node of a worker, with another cluster key."""


def join(sock: socket.socket, cluster_key: bytes) -> None:
    """The side that has called. Raises HandshakeError, and OSError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(MAGIC + ours)
    answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(cluster_key, b"leader", ours, theirs)):
        raise WrongKeyError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")
    sock.sendall(_proof(cluster_key, b"node", ours, theirs))


def admit(sock: socket.socket, cluster_key: bytes) -> None:
    """The side that was called. Raises likewise."""
    greeting = _exactly(sock, len(MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("what it says is not how a node begins")
    theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours + _proof(cluster_key, b"leader", theirs, ours))
    if not hmac.compare_digest(_exactly(sock, _PROOF_BYTES), _proof(cluster_key, b"node", theirs, ours)):
        raise WrongKeyError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")


def _proof(cluster_key: bytes, who: bytes, joining: bytes, leading: bytes) -> bytes:
    # A key of its own: nothing else that the cluster key signs is ever taken for a proof.
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
