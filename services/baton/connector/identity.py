"""Who is talking and whether they may: incarnations, signed handles, and what must match on both sides."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from array import array
from collections.abc import Sequence

from baton.connector.messages import Name
from baton.v1 import handoff_pb2 as pb

PROTOCOL = 4
"""Of handoffs. Workers of different ones are not paired, so it also tells releases apart in which the same
request gives other tokens: 2 draws by a race, 3 lets something come around a structured output. With 4 a link
begins with proofs."""


def new_incarnation() -> str:
    """128 random bits in hex: the name of one process start."""
    return secrets.token_hex(16)


def tokens_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the token ids as unsigned 32-bit words, little-endian."""
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("unsigned int is not 32 bits wide on this platform")
    return hashlib.sha256(words.tobytes()).digest()


def sign_handle(cluster_key: bytes, name: Name, decode_incarnation: str, num_tokens: int) -> bytes:
    """The router's leave for one attempt to enter one decode process. HMAC-SHA256, 32 bytes."""
    text = f"{name.request_id}\n{name.attempt}\n{decode_incarnation}\n{num_tokens}"
    return hmac.new(cluster_key, text.encode(), hashlib.sha256).digest()


def handle_is_valid(
    handle: bytes, cluster_key: bytes, name: Name, decode_incarnation: str, num_tokens: int
) -> bool:
    return hmac.compare_digest(handle, sign_handle(cluster_key, name, decode_incarnation, num_tokens))


def sign_switch(cluster_key: bytes, incarnation: str, role: str) -> bytes:
    """An operator's leave for one process to take a role ("prefill", "decode" or "both"). HMAC-SHA256."""
    text = f"switch-role\n{incarnation}\n{role}"
    return hmac.new(cluster_key, text.encode(), hashlib.sha256).digest()


def switch_is_valid(proof: bytes, cluster_key: bytes, incarnation: str, role: str) -> bool:
    return hmac.compare_digest(proof, sign_switch(cluster_key, incarnation, role))


def sign_beat(cluster_key: bytes, router_id: str, incarnation: str, nonce: bytes, count: int) -> bytes:
    """A router's proof that it lives, to the worker ``incarnation``, on the stream that it began with
    ``nonce``. HMAC-SHA256."""
    # A key of its own: nothing else that the cluster key signs is ever taken for a beat.
    key = hmac.digest(cluster_key, b"baton: beats of a router", hashlib.sha256)
    text = f"{router_id}\n{incarnation}\n{nonce.hex()}\n{count}"
    return hmac.digest(key, text.encode(), hashlib.sha256)


def beat_is_valid(
    proof: bytes, cluster_key: bytes, router_id: str, incarnation: str, nonce: bytes, count: int
) -> bool:
    return hmac.compare_digest(proof, sign_beat(cluster_key, router_id, incarnation, nonce, count))


def compatibility_digest(compatibility: pb.Compatibility) -> str:
    """64 bits in hex over the fields that ``first_mismatch`` compares: equal for workers that may be linked,
    where their block sizes fit."""
    # By name, and without what is not set: a release that adds a field stays alike until it is used.
    told = [
        f"{field.name}={value}" for field, value in compatibility.ListFields() if field.name != "block_size"
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def first_mismatch(ours: pb.Compatibility, theirs: pb.Compatibility) -> str | None:
    """The first field in which two workers' KV blocks differ in meaning, or None. Block sizes may differ."""
    for descriptor in pb.Compatibility.DESCRIPTOR.fields:
        if descriptor.name != "block_size" and getattr(ours, descriptor.name) != getattr(
            theirs, descriptor.name
        ):
            return str(descriptor.name)
    return None
