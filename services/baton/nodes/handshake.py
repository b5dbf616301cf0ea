"""The first bytes between two nodes of a worker: each proves to the other that it has the cluster key.

The joining node sends a nonce; the leader answers with its own and an HMAC over both; the joining node
answers with another HMAC. No nonce is used twice, and neither side's proof can be sent back as the other's.
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
    """The other side did not prove its identity; the message says how it failed."""


class WrongKeyError(HandshakeError):
    """The other side is a node of a worker, with another cluster key."""


def join(sock: socket.socket, cluster_key: bytes) -> None:
    """Prove the key as the side that called. Raises HandshakeError, and OSError."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(MAGIC + ours)
    answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(cluster_key, b"leader", ours, theirs)):
        raise WrongKeyError("it has another cluster key (--cluster-key, BATON_CLUSTER_KEY)")
    sock.sendall(_proof(cluster_key, b"node", ours, theirs))


def admit(sock: socket.socket, cluster_key: bytes) -> None:
    """Prove the key as the side that was called. Raises HandshakeError, and OSError."""
    greeting = _exactly(sock, len(MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("what it says is not how a node begins")
    theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours + _proof(cluster_key, b"leader", theirs, ours))
    if not hmac.compare_digest(_exactly(sock, _PROOF_BYTES), _proof(cluster_key, b"node", theirs, ours)):
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
