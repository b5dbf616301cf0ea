"""Identity and authorization: incarnations, signatures, and the compatibility of two workers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.role import Role
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.messages import Name
from baton.transport.kv_types import FP8_DYNAMIC
from baton.v1 import handoff_pb2 as pb

PROTOCOL = 6
"""The version of the handoff protocol. Workers of different versions are not paired, so a version also
separates releases in which the same request gives other tokens: 2 samples by an exponential race, 3 allows
text around a structured output. With 4 a link begins with proofs, with 5 long messages come in parts,
with 6 KV has groups."""


def new_incarnation() -> str:
    """Return a name for one process start: 128 random bits in hex."""
    return secrets.token_hex(16)


def tokens_digest(token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of the token ids as unsigned 32-bit words, little-endian."""
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("unsigned int is not 32 bits wide on this platform")
    return hashlib.sha256(words.tobytes()).digest()


def sign_handle(cluster_key: bytes, name: Name, decode_incarnation: str, num_tokens: int) -> bytes:
    """Sign the router's permission for one attempt to enter one decode process. HMAC-SHA256, 32 bytes."""
    text = f"{name.request_id}\n{name.attempt}\n{decode_incarnation}\n{num_tokens}"
    return hmac.new(cluster_key, text.encode(), hashlib.sha256).digest()


def handle_is_valid(
    handle: bytes, keys: ClusterKeys, name: Name, decode_incarnation: str, num_tokens: int
) -> bool:
    signed = (sign_handle(key, name, decode_incarnation, num_tokens) for key in keys.accepted)
    return any(hmac.compare_digest(handle, each) for each in signed)


def sign_switch(cluster_key: bytes, incarnation: str, role: Role) -> bytes:
    """Sign an operator's permission for one process to take a role. HMAC-SHA256."""
    text = f"switch-role\n{incarnation}\n{role}"
    return hmac.new(cluster_key, text.encode(), hashlib.sha256).digest()


def switch_is_valid(proof: bytes, keys: ClusterKeys, incarnation: str, role: Role) -> bool:
    signed = (sign_switch(key, incarnation, role) for key in keys.accepted)
    return any(hmac.compare_digest(proof, each) for each in signed)


def sign_beat(cluster_key: bytes, router_id: str, incarnation: str, nonce: bytes, count: int) -> bytes:
    """Sign a router's heartbeat to the worker ``incarnation``, for the stream that the router began with
    ``nonce``. HMAC-SHA256."""
    # Beats have a derived key: no other signature made with the cluster key can pass for a beat.
    key = hmac.digest(cluster_key, b"baton: beats of a router", hashlib.sha256)
    text = f"{router_id}\n{incarnation}\n{nonce.hex()}\n{count}"
    return hmac.digest(key, text.encode(), hashlib.sha256)


def beat_is_valid(
    proof: bytes, keys: ClusterKeys, router_id: str, incarnation: str, nonce: bytes, count: int
) -> bool:
    signed = (sign_beat(key, router_id, incarnation, nonce, count) for key in keys.accepted)
    return any(hmac.compare_digest(proof, each) for each in signed)


def compatibility_digest(compatibility: pb.Compatibility) -> str:
    """Return 64 bits in hex over the fields that ``first_mismatch`` compares: equal for workers that may be
    linked if their block sizes fit, and for KV whose blocks have scales of their own the block size, too."""
    # Hash set fields only, with their names: a release that adds a field stays compatible until it is used.
    told = [
        f"{field.name}={value}"
        for field, value in compatibility.ListFields()
        if field.name not in ("block_size", "groups")
    ]
    if compatibility.kv_dtype == FP8_DYNAMIC:
        told.append(f"block_size={compatibility.block_size}")
    for number, group in enumerate(compatibility.groups):
        told += [f"groups[{number}].{field.name}={value}" for field, value in group.ListFields()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def with_kv_dtype(compatibility: pb.Compatibility, kv_dtype: str) -> pb.Compatibility:
    """Return the same, of a worker whose KV is of another type."""
    other = pb.Compatibility()
    other.CopyFrom(compatibility)
    other.kv_dtype = kv_dtype
    return other


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field in which two workers' KV differs in meaning."""

    field: str
    ours: object
    theirs: object


def first_mismatch(ours: pb.Compatibility, theirs: pb.Compatibility) -> Mismatch | None:
    """Return the first field, other than the block size, in which two workers' KV differs in meaning, or
    None."""
    for descriptor in pb.Compatibility.DESCRIPTOR.fields:
        name = descriptor.name
        if name == "groups":
            differs = _groups_mismatch(ours.groups, theirs.groups)
            if differs is not None:
                return differs
        elif name != "block_size" and getattr(ours, name) != getattr(theirs, name):
            return Mismatch(name, getattr(ours, name), getattr(theirs, name))
    return None


def _groups_mismatch(ours: Sequence[pb.KVGroupSpec], theirs: Sequence[pb.KVGroupSpec]) -> Mismatch | None:
    if len(ours) != len(theirs):
        named = (", ".join(group.kind for group in groups) for groups in (ours, theirs))
        return Mismatch("groups", *named)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for descriptor in pb.KVGroupSpec.DESCRIPTOR.fields:
            values = getattr(mine, descriptor.name), getattr(other, descriptor.name)
            if values[0] != values[1]:
                return Mismatch(f"groups[{number}].{descriptor.name}", *values)
    return None
